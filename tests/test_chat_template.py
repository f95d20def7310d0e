"""The model's own chat template: rendered like elsewhere, refused cleanly, and unable to reach out."""

from __future__ import annotations

import pytest

from dspine_local.chat_template import render_chat

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "Hi"}]


def test_chatml() -> None:
    assert render_chat(CHATML, USER) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_without_the_beginning_of_an_answer() -> None:
    assert render_chat(CHATML, USER, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_special_tokens_and_variables() -> None:
    text = render_chat(
        "{{ bos_token }}{{ tools | tojson }}{{ eos_token }}", USER, bos_token="<s>", eos_token="</s>", tools=["é"]
    )
    assert text == '<s>["é"]</s>'


def test_what_templates_of_hugging_face_may_use() -> None:
    """Arguments of tojson, loop controls, and the marks of what is trained: GLM, Kimi, LFM2.5 and others need them."""
    tools = [{"b": "ü<", "a": 1}]
    for arguments, text in (
        ("", '[{"b": "ü<", "a": 1}]'),
        ("ensure_ascii=True", '[{"b": "\\u00fc<", "a": 1}]'),
        ("ensure_ascii=False, sort_keys=True, separators=(',', ':')", '[{"a":1,"b":"ü<"}]'),
        ("indent=1", '[\n {\n  "b": "ü<",\n  "a": 1\n }\n]'),
    ):
        assert render_chat(f"{{{{ tools | tojson({arguments}) }}}}", USER, tools=tools) == text
    marked = "{% for m in messages %}{%- generation -%} {{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert render_chat(marked, [*USER, *USER]) == "Hi"


def test_a_template_refuses_messages() -> None:
    with pytest.raises(ValueError, match="only user and assistant"):
        render_chat("{{ raise_exception('only user and assistant') }}", USER)


@pytest.mark.parametrize("template", ["{% if %}", "{{ messages[9]['content'] }}", "{{ 1 / 0 }}", "{{ messages + 1 }}"])
def test_a_broken_template_is_a_value_error(template: str) -> None:
    with pytest.raises(ValueError, match="chat template failed"):
        render_chat(template, USER)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['sys'] }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_hostile_template_reaches_nothing(template: str) -> None:
    with pytest.raises(ValueError, match="chat template failed"):
        render_chat(template, USER)
