"""Prompts from templates and examples."""

import json
from itertools import pairwise

import pytest

from pipeline.common.errors import UserError
from pipeline.common.json_lines import BadLine
from pipeline.generation.prompts import PromptTemplate

TEMPLATE = """\
{% for example in examples %}
{{ example.en }} = {{ example.de }}
{% endfor %}
{{ en }} =
"""
LINES = [{"en": f"word {number}", "de": f"Wort {number}"} for number in range(8)]


def opened(folder, text: str = TEMPLATE, count: int = 0, seed: int = 0, examples: str | None = None) -> PromptTemplate:
    (folder / "t.jinja").write_text(text)
    (folder / "e.jsonl").write_text("\n\n".join(map(json.dumps, LINES)) if examples is None else examples)
    return PromptTemplate(folder / "t.jinja", folder / "e.jsonl" if count or examples else None, count, seed)


def test_examples_depend_on_the_seed_and_the_line(tmp_path):
    assert opened(tmp_path).render(1, {"en": "word"}) == "word ="
    prompts = [opened(tmp_path, count=3, seed=seed).render(number, LINES[4]) for seed in (0, 1) for number in (1, 2)]
    assert prompts[0] == opened(tmp_path, count=3).render(1, LINES[4])
    assert all(first != second for first, second in pairwise(prompts))
    for prompt in prompts:
        *shown, question = prompt.split("\n")
        assert question == "word 4 ="
        assert len(set(shown)) == 3
        assert set(shown) <= {f"word {number} = Wort {number}" for number in range(8) if number != 4}
    with pytest.raises(BadLine, match="exceeds the 7 examples that differ from this line"):
        opened(tmp_path, count=8).render(1, LINES[4])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"text": "a\n{% for x in y %}\n"}, r"stage.template=.*line 2 is not valid in a Jinja template"),
        ({"text": "{{ en | uper }}"}, "line 1 .*No filter named 'uper'"),
        ({"text": "{{ en }}", "count": 1}, "does not use examples"),
        ({"count": 9}, "stage.few_shot=9: exceeds the 8 examples"),
        ({"examples": '{"a": 1}\n[2]\n'}, "stage.examples=.*line 2 is not an object"),
        ({"examples": '{"a": 1}\n\n{2\n'}, "line 3 is not JSON"),
    ],
)
def test_files_that_cannot_be_used_are_refused(options, message, tmp_path):
    with pytest.raises(UserError, match=message):
        opened(tmp_path, **options)


@pytest.mark.parametrize(
    "text, message",
    [
        (TEMPLATE, "stage.template fails in line 4: 'en' is undefined"),
        ("a\n{{ de.lower().x }}", "fails in line 2: .*no attribute 'x'"),
        ("{{ 1 / n }}", "division by zero"),
        ("{{ de.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_line_that_the_template_cannot_use_is_a_bad_line(text, message, tmp_path):
    with pytest.raises(BadLine, match=message):
        opened(tmp_path, text).render(1, {"de": "Wort", "n": 0})
