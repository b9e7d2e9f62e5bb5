"""Entry points of the console scripts. They install the Ctrl-C handler before they import anything else."""

from __future__ import annotations

from moeoffload.cli.signals import leave_at_once_on_ctrl_c


def moeoffload() -> None:
    """Entry point of ``moeoffload``."""
    leave_at_once_on_ctrl_c()
    from moeoffload.cli.host_app import main

    main()


def moeoffload_expert() -> None:
    """Entry point of ``moeoffload-expert``."""
    leave_at_once_on_ctrl_c()
    from moeoffload.cli.expert_app import main

    main()
