"""The rules of the house for python/tensorferry: who imports whom, and who touches whose privates.

As in rooms.py, every check takes the root of a tree and returns one line of text per violation.
"""

import ast
from functools import cache

# Lowest first. A room imports itself and rooms of the layers below, so rooms of one layer do not
# know each other. Rooms that do not exist yet have their place too.
LAYERS = [
    {"_core"},
    {"_callbacks", "_import_watch", "_notes", "_progress", "_shared_handle", "_tracing"},
    {"aio"},
    {"deepspeed", "sweep"},
    {"_memory"},
    {"_saving"},
    {"safetensors"},
    {"checkpoint"},
    {"dcp"},
    {"inspection"},
    {"offload", "optim"},
    {"_config"},
    {"snapshot"},
    {"plan", "transformers"},
    {"_at_start", "__init__"},
]
LAYER_OF = {room: number for number, layer in enumerate(LAYERS) for room in layer}

# It is a program of its own: it imports no other room, and no other room imports it.
ALONE = {"report"}

# `import tensorferry` loads these. __init__ imports all else at its first use, inside functions.
LOADED_AT_ONCE = {"_core", "aio"}

# Functions that ask for an attribute by its name.
ASKING = {"delattr", "getattr", "hasattr", "setattr"}

# Private names of Python and torch: modules, and attributes of their objects.
FOREIGN_MODULES = {"sys", "torch", "_aten"}
FOREIGN_ATTRIBUTES = {
    "_asdict",  # of named tuples
    "_replace",
    "_buffers",  # of torch.nn.Module
    "_forward_hooks",
    "_non_persistent_buffers_set",
    "_parameters",
    "_schema",  # of torch's operators
    "_untyped_storage",  # of torch.TypedStorage
    "_base",  # of torch.Tensor
    "_version",
    "_local_tensor",  # of torch's DTensor
    "_get_fsdp_state",  # of modules that FSDP2 has sharded, and of what it keeps of parameters
    "_extensions_data",
    "_init_extensions",
    "_fsdp_param_group",
    "_fsdp_param_groups",
    "_module_info",
    "_setattr_on_modules",
    "_sharded_param_data",
    "_init_weights",  # of transformers' PreTrainedModel
    "_no_split_modules",
    "_orig_mod",  # of modules that torch.compile has wrapped
}


def modules(root):
    """(path, name below the package) of each module."""
    package = root / "python" / "tensorferry"
    for path in sorted(package.rglob("*.py")):
        yield path, path.relative_to(package).as_posix()


def room_of(name):
    """The room of a file: its folder, or itself."""
    return name.split("/")[0].removesuffix(".py")


def imported(node, name):
    """The rooms that an import statement of a module names. The door is __init__."""
    if isinstance(node, ast.Import):
        dotted = [alias.name.split(".") for alias in node.names]
        return [room_named(parts[1:]) for parts in dotted if parts[0] == "tensorferry"]
    # From here on `from`: count the dots off the place of the module.
    if node.level:
        place = ["tensorferry", *name.split("/")[:-1]]
        parts = place[: len(place) - node.level + 1] + (node.module or "").split(".")
    else:
        parts = node.module.split(".")
    parts = [part for part in parts if part]
    if parts[:1] != ["tensorferry"]:
        return []
    if len(parts) > 1:
        return [room_named(parts[1:])]
    return [room_named([alias.name]) for alias in node.names]


def room_named(parts):
    known = parts and (parts[0] in LAYER_OF or parts[0] in ALONE)
    return parts[0] if known else "__init__"


def statements(tree):
    """(import statement, whether it runs when the module is loaded) of a module."""

    def visit(node, at_once):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                yield child, at_once
            lazy = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            lazy = lazy or (
                isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            )
            yield from visit(child, at_once and not lazy)

    return visit(tree, True)


# Tests look at copies of the package that differ in one file: what was read once is remembered.
@cache
def statements_in(text):
    return list(statements(ast.parse(text)))


@cache
def touched_in(text):
    return list(touched(ast.parse(text)))


def check_imports(root):
    """A room imports only itself and rooms below it."""
    found = []
    for path, name in modules(root):
        room = room_of(name)
        if room not in LAYER_OF and room not in ALONE:
            found.append(f"{name}: belongs to no room")
            continue
        for node, at_once in statements_in(path.read_text()):
            for other in imported(node, name):
                problem = judge_import(room, other, at_once)
                if problem:
                    found.append(f"{name}:{node.lineno}: imports {other}: {problem}")
    return found


def judge_import(room, other, at_once):
    if other == room:
        return None
    if room in ALONE or other in ALONE:
        return f"{room if room in ALONE else other} stands alone"
    if LAYER_OF[other] >= LAYER_OF[room]:
        return f"{room} does not stand above {other}"
    if room == "__init__" and at_once and other not in LOADED_AT_ONCE:
        return "import it when it is first used"
    return None


def private(name):
    return name.startswith("_") and not name.startswith("__")


def touched(tree):
    """(line, text) of each use of an attribute that is private to another object."""

    def own(value, classes):
        if isinstance(value, ast.Call):  # super() and type(self)
            text = ast.unparse(value)
            return text.startswith("super(") or text == "type(self)"
        while isinstance(value, ast.Attribute) and ast.unparse(value).startswith("torch."):
            value = value.value
        named = value.id if isinstance(value, ast.Name) else ""
        return named in {"self", "cls"} | classes | FOREIGN_MODULES

    def visit(node, classes):
        for child in ast.iter_child_nodes(node):
            touches = isinstance(child, ast.Attribute) and private(child.attr)
            if touches and child.attr not in FOREIGN_ATTRIBUTES and not own(child.value, classes):
                yield child.lineno, ast.unparse(child)
            name = name_asked_for(child)
            if private(name) and name not in FOREIGN_ATTRIBUTES and not own(child.args[0], classes):
                yield child.lineno, ast.unparse(child)
            if isinstance(child, ast.ImportFrom) and child.module and room_like(child):
                for alias in child.names:
                    if private(alias.name):
                        yield child.lineno, f"{child.module}.{alias.name}"
            inner = classes | {child.name} if isinstance(child, ast.ClassDef) else classes
            yield from visit(child, inner)

    return visit(tree, frozenset())


def name_asked_for(node):
    """The name in getattr(thing, "name") and the like; else nothing."""
    asks = isinstance(node, ast.Call) and ast.unparse(node.func) in ASKING and len(node.args) > 1
    return node.args[1].value if asks and isinstance(node.args[1], ast.Constant) else ""


def room_like(node):
    """Whether names come from a module of the package. The stub of _core has names for types."""
    return (node.level or node.module.startswith("tensorferry")) and node.module != "_core"


def check_privates(root):
    """No object touches the underscore attributes of another one."""
    return [
        f"{name}:{line}: touches {text}"
        for path, name in modules(root)
        for line, text in touched_in(path.read_text())
    ]
