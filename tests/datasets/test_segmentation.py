import ast
import re
from pathlib import Path

import datasets


def test_datasets_knows_no_configuration_key():
    """No group.key or group=choice: messages name arguments, or keys passed in by the caller."""
    folder = Path(datasets.__file__).parent
    groups = {entry.name for entry in (folder.parent / "configs").iterdir() if entry.is_dir()} | {"init", "resume"}
    assert {"data", "sampler"} < groups
    key = re.compile(rf"(?<![\w./])({'|'.join(sorted(groups))})(\.(?!py\b)[a-z_]+|=\w)")
    assert key.search("set data.root=DIR") and key.search("sampler=uniform") and not key.search("(docs/data.md)")
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not key.search(node.value), f"{path}:{node.lineno} names {key.search(node.value)[0]}"
