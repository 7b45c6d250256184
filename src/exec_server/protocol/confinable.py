"""The params of all operations that a sandbox may limit."""

from __future__ import annotations

from exec_server.protocol import file_changes, file_entries, file_watches, files

ConfinableParams = (
    files.ReadFileParams
    | files.WriteFileParams
    | files.OpenParams
    | files.CreateDirectoryParams
    | files.GetMetadataParams
    | files.CanonicalizeParams
    | files.ReadDirectoryParams
    | files.WalkParams
    | files.RemoveParams
    | files.CopyParams
    | file_changes.AppendParams
    | file_changes.RenameParams
    | file_changes.ChmodParams
    | file_changes.SymlinkParams
    | file_changes.SetTimesParams
    | file_changes.EditParams
    | file_changes.ApplyPatchParams
    | file_changes.GlobParams
    | file_changes.GrepParams
    | file_changes.DiskUsageParams
    | file_entries.ListParams
    | file_entries.CreateParams
    | file_entries.ResolveParams
    | file_watches.WatchParams
)
