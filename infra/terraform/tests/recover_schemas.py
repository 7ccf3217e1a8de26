"""Record the schemas of the types that our modules use, as `terraform providers schema -json` writes them.

    python -m infra.terraform.tests.recover_schemas FILE ...

A .json file is such a dump of the real provider, or cloud-init's own schema. A .tgz file is an npm package
@cdktf/provider-*: the source maps of its JavaScript hold the TypeScript generated from the provider's schema,
which says for every attribute its name, its type and whether it is required, optional or computed.
schemas/SOURCES.md lists the sources.
"""

import base64
import json
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

from infra.terraform.tests.typescript import Sources

HERE = Path(__file__).parent
SOURCE_MAP = re.compile(rb"sourceMappingURL=data:application/json;base64,([A-Za-z0-9+/=]+)")
NOISE = {"description", "description_kind", "deprecated"}


def from_package(path: Path, type_names: set[str]) -> dict[str, Any]:
    """Return the recorded form of an npm package of generated bindings."""
    with tarfile.open(path) as tar:
        about = json.loads(read_member(tar, "package/package.json"))["cdktf"]["provider"]
        prefix = about["name"].rsplit("/", 1)[1]
        matching = [name for name in type_names if re.match(rf"(data\.)?{prefix}_", name)]
        folders = {folder_of(name, prefix): name for name in matching}
        texts = read_sources(tar, {*folders, "provider"})
    provider = Sources(texts.pop("provider"))
    shape = next(name for name in provider.interfaces if name.endswith("ProviderConfig"))
    schemas: dict[str, Any] = {
        "provider": {"version": 0, "block": provider.provider(shape)},
        "resource_schemas": {},
        "data_source_schemas": {},
    }
    for folder, text in texts.items():
        sources = Sources(text)
        main = sources.main_class()
        table = "data_source_schemas" if folder.startswith("data-") else "resource_schemas"
        kind = folders[folder].removeprefix("data.")
        schemas[table][kind] = {"version": 0, "block": sources.block(main, main)}
    return {"provider_version": about["version"], "provider_schemas": {about["name"]: schemas}}


def read_member(tar: tarfile.TarFile, name: str | tarfile.TarInfo) -> bytes:
    """Return the bytes of one plain file in an archive."""
    file = tar.extractfile(name)
    if file is None:
        raise ValueError(f"{name} is not a plain file")
    return file.read()


def folder_of(name: str, prefix: str) -> str:
    """Return the package's folder of a type: google_compute_network is in compute-network."""
    plain = re.sub(rf"^(data\.)?{prefix}_", "", name).replace("_", "-")
    return f"data-{prefix}-{plain}" if name.startswith("data.") else plain


def read_sources(tar: tarfile.TarFile, folders: set[str]) -> dict[str, str]:
    """TypeScript by folder of the package."""
    texts: dict[str, str] = {}
    for info in tar:
        parts = info.name.split("/")
        if len(parts) < 4 or parts[2] not in folders or not parts[-1].endswith(".js"):
            continue
        if found := SOURCE_MAP.search(read_member(tar, info)):
            sources = json.loads(base64.b64decode(found[1]))["sourcesContent"]
            texts[parts[2]] = "\n".join([texts.get(parts[2], ""), *sources])
    return texts


def from_dump(path: Path, type_names: set[str]) -> dict[str, Any]:
    """Return the recorded form of a dump of the real provider, without prose and table of endpoints."""
    document = json.loads(path.read_text())
    address, schemas = next(iter(document["provider_schemas"].items()))
    schemas["provider"]["block"]["block_types"].pop("endpoints", None)
    kept = {
        "provider": schemas["provider"],
        "resource_schemas": {k: v for k, v in schemas["resource_schemas"].items() if k in type_names},
        "data_source_schemas": {
            k: v for k, v in schemas["data_source_schemas"].items() if f"data.{k}" in type_names
        },
    }
    return {"provider_schemas": {address: without_prose(kept)}}


def from_cloud_init(path: Path) -> dict[str, Any]:
    """Return the part of cloud-init's own schema that concerns the keys we use; any other key is refused."""
    known = json.loads(path.read_text())["$defs"]
    properties: dict[str, Any] = {}
    for module in ("cc_package_update_upgrade_install", "cc_write_files", "cc_runcmd"):
        properties |= known[module]["properties"]
    used = {key: properties[key] for key in ("packages", "write_files", "runcmd")}
    return {"type": "object", "additionalProperties": False, "properties": without_prose(used)}


def without_prose(node: Any) -> Any:
    """Drop descriptions and deprecation notes, which nothing here reads."""
    if isinstance(node, list):
        return [without_prose(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: value if key == "type" else without_prose(value)
        for key, value in node.items()
        if not (key in NOISE and isinstance(value, str | bool))
    }


def types_in_use(root: Path) -> set[str]:
    """Return every resource type of the configuration below root; data sources carry the prefix `data.`."""
    text = "\n".join(path.read_text() for path in root.rglob("*.tf"))
    found = re.findall(r'^(resource|data) "(\w+)"', text, re.M)
    return {name if kind == "resource" else f"data.{name}" for kind, name in found}


def one_type_a_line(document: dict[str, Any]) -> str:
    """Return the document as JSON, broken so that a diff shows which types changed."""
    text = json.dumps(document, separators=(",", ":"), sort_keys=True)
    return re.sub(r'(,|\{)("\w+":\{"block":)', r"\1\n\2", text) + "\n"


def main() -> None:
    """Write one file per argument: providers into schemas/, cloud-init's beside this file."""
    type_names = types_in_use(HERE.parent)
    for path in map(Path, sys.argv[1:]):
        if path.name.startswith("schema-cloud-config"):
            (HERE / "cloud-config.json").write_text(json.dumps(from_cloud_init(path), indent=2) + "\n")
            continue
        document = from_dump(path, type_names) if path.suffix == ".json" else from_package(path, type_names)
        address = next(iter(document["provider_schemas"]))
        target = HERE / "schemas" / f"{address.rsplit('/', 1)[1]}.json"
        target.write_text(one_type_a_line(document))


if __name__ == "__main__":
    main()
