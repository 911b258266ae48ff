"""GBNF: the grammars of llama.cpp's own guide, an independent matcher as judge, and errors with their place."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.structured.kit import bytes_tokenizer, follows
from vkit.errors import InvalidRequest
from vkit.structured.compiler import GrammarCompiler
from vkit.structured.gbnf import gbnf_to_lark, is_gbnf
from vkit.types import StructuredOutputs

TOKENIZER = bytes_tokenizer()

JSON_GRAMMAR = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""


def accepts(compiler: GrammarCompiler, grammar: str, text: str) -> bool:
    return follows(compiler.compile(StructuredOutputs(grammar=grammar)).result(), TOKENIZER, list(text.encode()))


def test_a_grammar_of_json(compiler: GrammarCompiler) -> None:
    for text in ('{"a": [1, 2.5e1, {"b": "\\u00e9\\n"}], "c":null}', "{}", '{\n  "é": true\n}', '{"a":-0}'):
        assert accepts(compiler, JSON_GRAMMAR, text), text
    for text in ("[]", '{"a":}', '{"a":1', '{"a" 1}', '{"a":01}', "{'a':1}"):
        assert not accepts(compiler, JSON_GRAMMAR, text), text


@pytest.mark.parametrize(
    ("grammar", "valid", "invalid"),
    [
        (r'root ::= ("a" | "ab") "bc"', ["abc", "abbc"], ["ab", "abb"]),
        (r'root ::= "a"* "ab"', ["ab", "aaab"], ["b", "aa"]),
        (r"root ::= . .", ["a\n", "é😀"], ["a", "abc"]),
        (r'root ::= "\x41\u00e9\U0001F600"', ["Aé😀"], ["A"]),
        ("root ::= [a-c\\]-]+", ["a]-c"], ["d"]),
        (r"root ::= [^a]{2,}", ["bc", "bcd\n"], ["b", "ba"]),
        ('root ::=\n  "a" |\n  "b"\n', ["a", "b"], ["ab"]),
        ('root ::= "a"\n  | "b"\nx ::= "c"', ["a", "b"], ["c"]),
        ('root ::= ( "a"\n "b" )?', ["", "ab"], ["a"]),
        ('root ::= item item?\nitem ::= "(" root ")" | "x"', ["x", "xx", "(x)x", "((xx))"], ["", "(", "xxx"]),
        ('root ::= "[" (root ("," root)*)? "]"', ["[]", "[[],[[]]]"], ["[", "[,]"]),
        ('root ::= a-b\na-b ::= "x" A1\nA1 ::= "y"', ["xy"], ["x"]),
        ('root ::= "/" "\\"" "\\\\"', ['/"\\'], ["/"]),
        ('root ::= ""', [""], ["a"]),
        ('root ::= "a" ws "b"\nws ::= [ ]*', ["ab", "a  b"], ["a b "]),
        ('root ::= "(" ws root? ws ")"\nws ::= [ ]*', ["()", "( () )", "(  )"], ["(", "( ) "]),
    ],
)
def test_notation(compiler: GrammarCompiler, grammar: str, valid: list[str], invalid: list[str]) -> None:
    for text in valid:
        assert accepts(compiler, grammar, text), text
    for text in invalid:
        assert not accepts(compiler, grammar, text), text


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= "a', "line 1, column 10: this text has no closing quote"),
        ("root ::= [a", "line 1, column 10: this character class has no closing bracket"),
        ("root ::= []", "this character class is empty"),
        ("root ::= [z-a]", "the range 'z' to 'a' is empty"),
        ('root ::= ("a"', "line 1, column 10: this group has no closing parenthesis"),
        ('root ::= "a")', "line 1, column 13: unexpected ')'"),
        ('root ::= "a"\nx := "b"', "line 2, column 3: expected ::="),
        ('root ::= "a" nobody', "line 1, column 14: there is no rule 'nobody'"),
        ('start ::= "a"', "there is no rule named root"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule 'root' is defined twice"),
        (r'root ::= "\q"', r"unknown escape \q"),
        (r'root ::= "\ud800"', "unknown escape"),
        ('root ::= "a"{x}', "expected {n}"),
        ('root ::= "a"{5,2}', "cannot repeat"),
        ('root ::= "a"{99999}', "cannot repeat"),
        ("root ::= <[12]>", "unexpected '<'"),
        ("root ::= " + "(" * 200, "nested too deeply"),
    ],
)
def test_errors_have_a_place(grammar: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        gbnf_to_lark(grammar)
    assert message in str(caught.value)
    assert str(caught.value).startswith("structured_outputs: grammar: ")


def test_the_notation_is_told_by_its_form(compiler: GrammarCompiler) -> None:
    assert is_gbnf("# c\n  root ::= x")
    assert not is_gbnf('start: "::="')
    with pytest.raises(InvalidRequest, match=r'grammar: .*unknown name: "nobody"'):
        compiler.check(StructuredOutputs(grammar="start: nobody"))
    with pytest.raises(InvalidRequest, match="grammar: "):
        compiler.check(StructuredOutputs(grammar="anything"))


PATTERNS = st.recursive(
    st.sampled_from([('"a"', "a"), ('"ab"', "ab"), ("[bc]", "[bc]"), ("[^a]", "[^a]")]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("*+?")).map(lambda x: (f"({x[0][0]}){x[1]}", f"(?:{x[0][1]}){x[1]}")),
        st.lists(inner, min_size=2, max_size=3).map(
            lambda xs: ("(" + " ".join(x[0] for x in xs) + ")", "".join(f"(?:{x[1]})" for x in xs))
        ),
        st.lists(inner, min_size=2, max_size=3).map(
            lambda xs: ("(" + " | ".join(x[0] for x in xs) + ")", "(?:" + "|".join(x[1] for x in xs) + ")")
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(pattern=PATTERNS, texts=st.lists(st.text("abc", max_size=6), min_size=3, max_size=6))
def test_regular_grammars_match_what_re_matches(pattern: tuple[str, str], texts: list[str]) -> None:
    grammar, regex = pattern
    compiler = GrammarCompiler(TOKENIZER, TOKENIZER.eos_token_ids)
    try:
        for text in texts:
            assert accepts(compiler, f"root ::= {grammar}\n", text) == bool(re.fullmatch(regex, text, re.DOTALL)), text
    finally:
        compiler.close()
