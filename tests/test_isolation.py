"""Two hosts on one server: neither can speak for the other, see its frames or use its lease."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import zmq
from command_lines import STEP_TIMEOUT_S
from conftest import DEMO, StartServer
from engine_kit import raw_exchange, set_field

from moeoffload import OffloadedModel, open_model
from moeoffload.transport.stream import StreamHostEnd
from moeoffload.wire import ErrorCode

PROMPT = torch.tensor([[7, 8, 9, 10]])


@contextlib.contextmanager
def two_hosts(address: str, transport: str) -> Iterator[tuple[OffloadedModel, OffloadedModel, torch.Tensor]]:
    """Two hosts and the logits of `PROMPT`; afterwards the first still gets the same ones."""
    with (
        open_model(DEMO, experts=[address], transport=transport, device="cpu") as first,
        open_model(DEMO, experts=[address], transport=transport, device="cpu") as second,
        torch.inference_mode(),
    ):
        logits = first.model(PROMPT).logits
        assert torch.equal(second.model(PROMPT).logits, logits)
        yield first, second, logits
        assert torch.equal(first.model(PROMPT).logits, logits)


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_a_frame_with_the_epoch_of_another_host_is_refused(three_servers: list[str], transport: str) -> None:
    with two_hosts(three_servers[0], transport) as (first, second, _):
        code, text, _ = raw_exchange(second.links[0], set_field("epoch", first.links[0]._epoch))
        assert code == ErrorCode.BAD_FRAME
        assert "epoch" in text


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_no_secret_of_a_host_is_in_logs_or_answers_that_others_see(start_server: StartServer, transport: str) -> None:
    server = start_server("--log-level", "debug")
    with two_hosts(server.address, transport) as (first, second, _):
        link = first.links[0]
        channel = link._channel
        secrets = [link._lease.lease_id]
        if isinstance(channel, StreamHostEnd):
            secrets.append(channel._wire.socket.getsockopt(zmq.ROUTING_ID).hex())  # type: ignore[union-attr]
        else:
            secrets += [channel._segment.name, channel.nonce.hex()]  # type: ignore[attr-defined]
        raw_exchange(second.links[0], set_field("epoch", link._epoch))
        client = second.links[0]._client
        seen = f"{client.stats(STEP_TIMEOUT_S)} {client.describe(STEP_TIMEOUT_S)} {server.log_text}"
        assert all(secret not in seen for secret in secrets)
