"""A Terraform provider that serves recorded schemas and makes up every API answer (plugin protocol 6).

    with serve([Path("schemas/google.json")]) as environment:
        subprocess.run(["terraform", "validate"], env={**os.environ, **environment})

Terraform attaches to the running server (TF_REATTACH_PROVIDERS): nothing is installed, no lock file is
written, no process is started per command. Does not know what only a cloud's API knows, such as quotas.
"""

# ruff: noqa: N802 -- the protocol names the calls

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import msgpack  # type: ignore[import-untyped]

from infra.terraform.tests import planning

HERE = Path(__file__).parent
NESTING = {"single": 1, "list": 2, "set": 3, "map": 4, "group": 5}
FLAGS = ("required", "optional", "computed", "sensitive", "write_only")


def compile_protocol() -> tuple[Any, Any]:
    """Messages and services of tfplugin.proto; gRPC looks the file up on sys.path."""
    sys.path.append(str(HERE))
    try:
        messages, services = grpc.protos_and_services("tfplugin.proto")
    finally:
        sys.path.remove(str(HERE))
    return messages, services


pb, rpc = compile_protocol()


def decode(value: Any) -> Any:
    """Return a wire value as plain Python, unknowns kept as planning.UNKNOWN."""
    if value.msgpack:
        return msgpack.unpackb(value.msgpack, raw=False, strict_map_key=False)
    return json.loads(value.json or b"null")


def encode(value: Any) -> Any:
    """Return the inverse of decode."""
    return pb.DynamicValue(msgpack=msgpack.packb(value))


def attribute_message(name: str, attribute: dict[str, Any]) -> Any:
    """One attribute of a JSON schema on the wire."""
    message = pb.Attribute(name=name, **{flag: True for flag in FLAGS if attribute.get(flag)})
    if "type" in attribute:
        message.type = json.dumps(attribute["type"]).encode()
    else:
        inner = attribute["nested_type"]
        message.nested_type.nesting = NESTING[inner["nesting_mode"]]
        message.nested_type.attributes.extend(
            attribute_message(*item) for item in inner["attributes"].items()
        )
    return message


def block_message(block: dict[str, Any]) -> Any:
    """One block of a JSON schema on the wire."""
    return pb.Block(
        attributes=[attribute_message(*item) for item in block.get("attributes", {}).items()],
        block_types=[
            pb.NestedBlock(
                type_name=name,
                block=block_message(inner["block"]),
                nesting=NESTING[inner["nesting_mode"]],
                min_items=inner.get("min_items", 0),
                max_items=inner.get("max_items", 0),
            )
            for name, inner in block.get("block_types", {}).items()
        ],
    )


def schema_message(schema: dict[str, Any]) -> Any:
    """Return a resource's, data source's or provider's schema on the wire."""
    return pb.Schema(version=schema.get("version", 0), block=block_message(schema["block"]))


class Stub(rpc.ProviderServicer):  # type: ignore[misc,name-defined]
    """One provider: the RPC names are the protocol's."""

    def __init__(self, schemas: dict[str, Any]) -> None:
        self.provider = schemas["provider"]
        self.resources = schemas["resource_schemas"]
        self.data_sources = schemas["data_source_schemas"]
        self.schemas = pb.Schemas(
            provider=schema_message(self.provider),
            resource_schemas={name: schema_message(schema) for name, schema in self.resources.items()},
            data_source_schemas={name: schema_message(schema) for name, schema in self.data_sources.items()},
        )

    def GetMetadata(self, _request: Any, _context: Any) -> Any:
        return pb.Metadata(
            resources=[pb.TypeName(type_name=name) for name in self.resources],
            data_sources=[pb.TypeName(type_name=name) for name in self.data_sources],
        )

    def GetProviderSchema(self, _request: Any, _context: Any) -> Any:
        return self.schemas

    def GetFunctions(self, _request: Any, _context: Any) -> Any:
        return pb.Empty()

    def ValidateProviderConfig(self, _request: Any, _context: Any) -> Any:
        return pb.Empty()

    def ConfigureProvider(self, _request: Any, _context: Any) -> Any:
        return pb.Empty()

    def StopProvider(self, _request: Any, _context: Any) -> Any:
        return pb.Empty()

    def ValidateResourceConfig(self, request: Any, _context: Any) -> Any:
        return diagnose(self.resources[request.type_name]["block"], request)

    def ValidateDataResourceConfig(self, request: Any, _context: Any) -> Any:
        return diagnose(self.data_sources[request.type_name]["block"], request)

    def UpgradeResourceState(self, request: Any, _context: Any) -> Any:
        return pb.UpgradedState(upgraded_state=pb.DynamicValue(json=request.raw_state.json))

    def ReadResource(self, request: Any, _context: Any) -> Any:
        return pb.ReadState(new_state=request.current_state)

    def PlanResourceChange(self, request: Any, _context: Any) -> Any:
        block = self.resources[request.type_name]["block"]
        planned = planning.plan(block, decode(request.proposed_new_state), decode(request.prior_state))
        return pb.PlannedState(planned_state=encode(planned), legacy_type_system=True)

    def ApplyResourceChange(self, request: Any, _context: Any) -> Any:
        planned = decode(request.planned_state)
        seed = planning.seed_of(request.type_name, planned)
        state = planning.apply(self.resources[request.type_name]["block"], planned, seed)
        return pb.AppliedState(new_state=encode(state), legacy_type_system=True)

    def ReadDataSource(self, request: Any, _context: Any) -> Any:
        block, config = self.data_sources[request.type_name]["block"], decode(request.config)
        seed = planning.seed_of(request.type_name, config)
        return pb.DataState(state=encode(planning.apply(block, planning.plan(block, config, None), seed)))


def diagnose(block: dict[str, Any], request: Any) -> Any:
    """Return an error for every read-only attribute that the configuration sets."""
    return pb.Diagnostics(
        diagnostics=[
            pb.Diagnostic(
                severity=1,
                summary="Value for unconfigurable attribute",
                detail=f"{name} is set by the provider alone",
                attribute=pb.AttributePath(steps=[pb.AttributePath.Step(attribute_name=name)]),
            )
            for name in planning.misuse(block, decode(request.config))
        ]
    )


@contextmanager
def serve_one(document: dict[str, Any], socket: Path) -> Iterator[dict[str, Any]]:
    """Serve one recorded provider on a socket; yields what Terraform needs to attach to it."""
    address, schemas = next(iter(document["provider_schemas"].items()))
    server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.max_send_message_length", -1)])
    rpc.add_ProviderServicer_to_server(Stub(schemas), server)
    server.add_insecure_port(f"unix://{socket}")
    server.start()
    try:
        yield {
            address: {
                "Protocol": "grpc",
                "ProtocolVersion": 6,
                "Pid": os.getpid(),
                "Test": True,
                "Addr": {"Network": "unix", "String": str(socket)},
            }
        }
    finally:
        server.stop(None).wait()


@contextmanager
def serve(schemas: Iterable[Path]) -> Iterator[dict[str, str]]:
    """Serve recorded providers; yields the environment that makes Terraform use them instead of real ones."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        reattach: dict[str, Any] = {}
        for path in schemas:
            document = json.loads(path.read_text())
            reattach |= stack.enter_context(serve_one(document, folder / path.stem))
        yield {"TF_REATTACH_PROVIDERS": json.dumps(reattach)}
