"""Read a provider's schema out of the TypeScript that cdktf generated from it. Does not read files."""

import re
from typing import Any, NamedTuple

CLASS = re.compile(r"^export class (\w+) extends cdktf\.(\w+) \{\n(.*?)^\}", re.M | re.S)
INTERFACE = re.compile(r"^export interface (\w+)[^{\n]*\{\n(.*?)^\}", re.M | re.S)
FIELD = re.compile(r"/\*\*((?:(?!\*/).)*)\*/\s*readonly \w+(\?)?: ([^;]*);", re.S)
TO_HCL = re.compile(r"^export function (\w+)ToHclTerraform\(.*?\n(.*?)^\}", re.M | re.S)
MEMBER = re.compile(
    r"^  // (\w+) - computed: (\w+), optional: (\w+), required: (\w+)\n(.*?)(?=^  // \w+ - computed|\Z)",
    re.M | re.S,
)
HCL_ENTRY = re.compile(r'(\w+): \{\s*value: .*?,\s*isBlock: (\w+),\s*type: "(\w+)"', re.S)
OBJECTS = re.compile(r"^.*= new (\w+)\(this, \"\w+\"(?:, (true|false))?\)")
SCALARS = {"string": "string", "number": "number", "boolean": "bool"}
READERS = {"List": ["list", "string"], "NumberList": ["list", "number"], "StringMap": ["map", "string"]}

Block = dict[str, Any]


class Entry(NamedTuple):
    """A member as the generated code writes it in HCL."""

    is_block: bool
    kind: str  # simple, struct, list, set or map


def entries_of(code: str) -> dict[str, Entry]:
    """Return the HCL table of a class or of a conversion function."""
    return {name: Entry(is_block == "true", kind) for name, is_block, kind in HCL_ENTRY.findall(code)}


class Sources:
    """The TypeScript of one resource type, or of the provider."""

    def __init__(self, text: str) -> None:
        self.classes = {name: code for name, _, code in CLASS.findall(text)}
        self.parents: dict[str, str] = {name: parent for name, parent, _ in CLASS.findall(text)}
        self.interfaces: dict[str, str] = dict(INTERFACE.findall(text))
        self.to_hcl = {name.lower(): code for name, code in TO_HCL.findall(text)}

    def main_class(self) -> str:
        """Return the class of the resource or data source itself."""
        mains = ("TerraformResource", "TerraformDataSource")
        return next(name for name, parent in self.parents.items() if parent in mains)

    def block(self, class_name: str, shape: str) -> Block:
        """Return the schema block behind a class; shape is the name of its interface."""
        code = self.classes[class_name]
        entries = entries_of(self.to_hcl.get(shape.lower()) or code)
        block: Block = {"attributes": {}, "block_types": {}}
        for name, computed, optional, required, body in MEMBER.findall(code):
            documented = {"computed": computed, "optional": optional, "required": required}
            flags = {flag: True for flag, value in documented.items() if value == "true"}
            entry = entries.get(name, Entry(False, ""))
            made = OBJECTS.match(body)
            if made:
                self.add_objects(block, name, made, entry, flags)
                continue
            if name.endswith("_wo") and "computed" not in flags:
                flags["write_only"] = True
            block["attributes"][name] = {"type": plain_type(body, entry), **flags}
        return without_empty(block)

    def add_objects(self, block: Block, name: str, made: re.Match[str], entry: Entry, flags: Block) -> None:
        """Add a member that holds objects: a nested block where Terraform has one, else an attribute."""
        shape = re.sub(r"(List|Map|OutputReference)$", "", made[1])
        inner = self.block(shape + "OutputReference", shape)
        fallback = "set" if made[2] == "true" else "list"
        mode = entry.kind if entry.kind in ("list", "set", "map") else fallback
        if not (entry.is_block and self.documented_as_block(name)):
            kind = ["object", {key: as_type(value) for key, value in members(inner).items()}]
            block["attributes"][name] = {"type": [mode, kind], **flags}
            return
        nested: Block = {"nesting_mode": "single" if name == "timeouts" else mode, "block": inner}
        if flags.get("required"):
            nested["min_items"] = 1
        if made[1].endswith("OutputReference") and name != "timeouts":
            nested["max_items"] = 1
        block["block_types"][name] = nested

    def documented_as_block(self, name: str) -> bool:
        """Return whether the documentation says `NAME block`, as it does not of attributes like blocks."""
        return any(re.search(rf"^\s*\* {name} block$", text, re.M) for text in self.interfaces.values())

    def provider(self, shape: str) -> Block:
        """Return a provider's own block, which has interfaces only, without its table of endpoints."""
        block: Block = {"attributes": {}, "block_types": {}}
        entries = entries_of("\n".join([*self.classes.values(), self.to_hcl.get(shape.lower(), "")]))
        for prose, optional, kind in FIELD.findall(self.interfaces[shape]):
            found = re.search(r"#(\w+) \w+#\1\}", prose)
            if not found or found[1] == "alias" or found[1].endswith("_custom_endpoint"):
                continue
            name = found[1]
            inner = re.sub(r"\[\]|cdktf\.IResolvable|[|() ]", "", kind)
            if inner in self.interfaces:
                limits = ({} if optional else {"min_items": 1}) | ({} if "[]" in kind else {"max_items": 1})
                nested = {"nesting_mode": "list", "block": self.provider(inner), **limits}
                block["block_types"][name] = nested
            else:
                collection = entries.get(name, Entry(False, "")).kind
                flag = "optional" if optional else "required"
                block["attributes"][name] = {"type": parse_type(kind, collection), flag: True}
        return without_empty(block)


def without_empty(block: Block) -> Block:
    """Return the block without tables that hold nothing."""
    return {key: value for key, value in block.items() if value}


def members(block: Block) -> Block:
    """Attributes and nested blocks of a block, as one table."""
    return {**block.get("attributes", {}), **block.get("block_types", {})}


def as_type(member: Block) -> Any:
    """Return the cty type of a member of an attribute of objects."""
    if "type" in member:
        return member["type"]
    kind = ["object", {key: as_type(value) for key, value in members(member["block"]).items()}]
    return [member["nesting_mode"], kind]


def plain_type(body: str, entry: Entry) -> Any:
    """Return the cty type of a member without objects, from its private field or from how it is read."""
    if stored := re.match(r"\s*private _\w+\?: (.*?);", body):
        return parse_type(stored[1], entry.kind)
    if table := re.search(r"= new cdktf\.(String|Number|Boolean|Any)Map\(", body):
        return ["map", SCALARS.get(table[1].lower(), "dynamic")]
    read = re.search(r"this\.get(String|Number|Boolean|List|NumberList|StringMap)Attribute\(", body)
    name = read[1] if read else "String"
    kind = READERS.get(name) or SCALARS[name.lower()]
    return ["set", kind[1]] if "Fn.tolist" in body and isinstance(kind, list) else kind


def parse_type(typescript: str, collection: str) -> Any:
    """Return the cty type behind a TypeScript type such as `string[]` or `{ [key: string]: string }`."""
    text = re.sub(r"\s*\|?\s*cdktf\.IResolvable", "", typescript).strip()
    if text in SCALARS:
        return SCALARS[text]
    if table := re.fullmatch(r"\{ \[key: string\]: (.*) \}", text):
        return ["map", parse_type(table[1], "")]
    if text.endswith("[]"):
        return ["set" if collection == "set" else "list", parse_type(text[:-2].strip("() "), "")]
    return "dynamic"
