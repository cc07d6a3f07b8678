# SPDX-License-Identifier: Apache-2.0
"""Parsing of PTX as cutlass prints it: one entry, one instruction per line."""

from __future__ import annotations

import re


class Program:
    """Parsed PTX: one entry with its instructions, labels and parameters."""

    def __init__(self, ptx: str) -> None:
        ptx = re.sub(r"//[^\n]*", "", ptx)
        head, body = ptx.split(")\n.reqntid", 1)
        self.threads = int(re.match(r"\s*(\d+)", body).group(1))
        # Behind the entry there may be sections for a debugger.
        body = re.split(r"\n\s*\.section", body)[0]
        self.params = []  # (name, bytes)
        for kind, name, count in re.findall(
            r"\.param\s+(?:\.align \d+\s+)?\.(\w+)\s+(?:\.ptr\s+\.global\s+\.align \d+\s+)?"
            r"(\w+?)(?:\[(\d+)\])?\s*(?:,|\n|$)",
            head,
        ):
            size = int(count) if count else {"u64": 8, "u32": 4, "f32": 4, "b64": 8, "b32": 4}[kind]
            self.params.append((name, size))
        self.code: list[tuple] = []
        self.labels: dict[str, int] = {}
        self._parse(body[body.index("{") + 1 : body.rindex("}")])

    def _parse(self, body: str) -> None:
        """One instruction, label or brace a line; braces of their own are scopes of names."""
        scopes, opened = [""], 0
        for line in body.splitlines():
            text = line.strip()
            if text == "{":
                opened += 1
                scopes.append(f"@{opened}")
            elif text == "}":
                scopes.pop()
            elif match := re.fullmatch(r"([$\w]+):", text):
                self.labels[match.group(1) + scopes[-1]] = len(self.code)
            elif text and not text.startswith("."):
                self.code.append(self._instruction(text.rstrip(";").strip(), scopes[-1]))

    def _instruction(self, text: str, scope: str) -> tuple:
        guard = None
        if match := re.match(r"@(!?)(%?\w+)\s+", text):
            name = match.group(2)
            guard = (name if name[0] == "%" else name + scope, bool(match.group(1)))
            text = text[match.end() :]
        opcode, _, rest = text.partition(" ")
        operands = _split(rest)
        # registers declared within a scope are its own
        if scope:
            operands = [re.sub(r"(?<![\w%$.])[A-Za-z]\w*", rf"\g<0>{scope}", o) for o in operands]
        return guard, opcode, operands


def _split(text: str) -> list[str]:
    """Operands between commas that lie in no bracket."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "[{") - (char in "]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts] if text else []
