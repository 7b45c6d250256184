"""The text of the metrics."""

from __future__ import annotations

from exec_server.hosting.metrics import Metrics


def test_counters_histograms_and_gauges_are_printed() -> None:
    metrics = Metrics()
    metrics.requests.add("connect", "200")
    metrics.requests.add("connect", "200")
    metrics.relayed_bytes.add("to_client", count=70)
    metrics.request_seconds.observe("connect", 0.002)
    metrics.request_seconds.observe("connect", 99.0)
    lines = metrics.text({"executors": 3}).splitlines()
    prefix = "exec_server_registry_"
    assert f"# TYPE {prefix}executors gauge" in lines
    assert f"{prefix}executors 3" in lines
    assert f'{prefix}requests_total{{endpoint="connect",code="200"}} 2' in lines
    assert f'{prefix}relayed_bytes_total{{direction="to_client"}} 70' in lines
    assert f'{prefix}request_seconds_bucket{{endpoint="connect",le="0.001"}} 0' in lines
    assert f'{prefix}request_seconds_bucket{{endpoint="connect",le="0.0025"}} 1' in lines
    assert f'{prefix}request_seconds_bucket{{endpoint="connect",le="+Inf"}} 2' in lines
    assert f'{prefix}request_seconds_sum{{endpoint="connect"}} 99.002000' in lines
    assert f'{prefix}request_seconds_count{{endpoint="connect"}} 2' in lines
