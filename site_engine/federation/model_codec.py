"""Convert the models of a site, with what they have in memory, to protobuf."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from site_engine.core.chain import Block
from site_engine.messages import Model
from wire import federation_pb2 as pb

MAX_BLOCKS = 20_000
"""Of the models of a site, about 0.7 MB: the blocks of models after those are not announced."""


def encode_models(models: Iterable[Model]) -> list[pb.Model]:
    encoded, room = [], MAX_BLOCKS
    for model in models:
        own = {each.name: getattr(model, each.name) for each in fields(model)}
        room -= len(model.blocks)
        own["blocks"] = map(encode_block, model.blocks) if room >= 0 else ()
        encoded.append(pb.Model(owned_by="mico", **own))
    return encoded


def encode_block(block: Block) -> pb.Block:
    own = block._asdict() | {"id": bytes.fromhex(block.id[:16]), "kind": block.kind.name}
    return pb.Block(**own)
