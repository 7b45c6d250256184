"""The tests of exec-server."""
