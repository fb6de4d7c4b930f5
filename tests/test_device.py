"""What is copied to a device, counted. (The device without memory, `meta`, stands for a GPU.)"""

import torch

from qfleet.device import Transfers

META = torch.device("meta")


def test_what_is_sent_is_counted_and_what_is_there_is_not() -> None:
    transfers, there = Transfers(META), torch.zeros(7, device=META)
    sent = transfers.send([torch.zeros(3, 4), there, torch.zeros(5, dtype=torch.uint8)])
    assert [x.device for x in sent] == [META] * 3 and sent[1] is there
    assert transfers.bytes == 3 * 4 * 4 + 5
    before = transfers.seconds
    assert before > 0
    assert transfers.send([there]) == [there]
    assert transfers.bytes == 53 and transfers.seconds == before


def test_copies_to_buffers_are_counted() -> None:
    transfers, buffer = Transfers(torch.device("cpu")), torch.zeros(4)
    transfers.copy([(buffer, torch.arange(4.0))])
    assert buffer.tolist() == [0, 1, 2, 3] and transfers.bytes == 16
