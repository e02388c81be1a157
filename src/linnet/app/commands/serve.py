"""`linnet serve`: a local page for one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def serve(
    *,
    run: Path,
    port: int = 0,
    browser: bool = False,
    model: str | None = None,
    memory: str | None = None,
    device: str = "cpu",
    trust: bool = False,
) -> dict[str, Any]:
    """Open a local page: predict a sample, see the training samples behind it, forget one, see what changes.

    The page is for this machine alone and opens with the key in the printed address. Nothing is written:
    what is forgotten there is forgotten until the server stops (Ctrl-C).

    Args:
        run: The folder that linnet adapt, forget or update wrote.
        port: The port on this machine; one that is free by default.
        browser: Whether to open the page in a browser.
        model: The network's factory, where the run's own is not here or not to be run.
        memory: Memory budget, such as 2GB (default: half of the free memory).
        device: The device to compute on, such as cpu or cuda; auto is the first of cuda, mps, cpu here.
        trust: Whether to run code that a run of another user names.

    Returns:
        Where the page was.
    """
    import contextlib
    import sys
    import webbrowser

    from linnet.app.runs.folder import load_run
    from linnet.app.runs.settings import check_device
    from linnet.app.serve.server import Server
    from linnet.app.serve.session import Session
    from linnet.params import integer

    integer("port", port, least=0, most=65535)
    check_device(device)
    session = Session(load_run(run, device, memory, model=model, trust=trust), run.resolve().name)
    with Server(session, port) as server:
        # on standard error, so that it is seen with --json and --quiet too
        print(f"{server.address}\nPress Ctrl-C to stop.", file=sys.stderr, flush=True)
        if browser:
            webbrowser.open(server.address)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return {"command": "serve", "run": str(run), "port": server.server_port}
