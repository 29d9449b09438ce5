"""Safetensors files, good and bad: one for each thing that a header can do.

Tests compare the verdicts of tensorferry with those of the safetensors package on them. The fuzzer
starts from them: `python3 safetensors_cases.py FOLDER` writes each to a file.
"""

import random
import struct
import sys
from pathlib import Path

ENTRY = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
# The bits of each.
DTYPES = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


def file_of(header, data_bytes=8):
    """A file with this text as its header, and so many bytes after it."""
    text = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(text)) + text + bytes(i % 251 for i in range(data_bytes))


def entry(dtype='"F32"', shape="[2]", offsets="[0,8]"):
    return f'{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'


def tensor(name, dtype, shape, begin, end):
    return f'"{name}":{{"dtype":"{dtype}","shape":{list(shape)},"data_offsets":[{begin},{end}]}}'


def with_field(value, key='"z"'):
    """A good file whose tensor has one more field."""
    return file_of(f'{{"a":{ENTRY[:-1]},{key}:{value}}}}}')


def lengths():
    """The first 8 bytes."""
    yield "no_bytes", b""
    yield "seven_bytes", bytes(7)
    yield "eight_zeros", bytes(8)
    yield "length_one_too_long", struct.pack("<Q", 3) + b"{}"
    yield "length_one_too_short", struct.pack("<Q", 1) + b"{}"
    yield "length_of_64_bits", b"\xff" * 8 + b"{}"
    yield "length_of_63_bits", struct.pack("<Q", 2**63 - 1) + b"{}"
    yield "length_beyond_the_limit", struct.pack("<Q", 100_000_001) + b"{}"
    yield "length_at_the_limit_in_a_short_file", struct.pack("<Q", 100_000_000) + b"{}"
    yield "length_big_endian", struct.pack(">Q", 2) + b"{}"


def frames():
    """What stands around the tensors."""
    good = f'{{"a":{ENTRY}}}'
    for name, before in (
        ("space", " "),
        ("white_space", "\n\t\r "),
        ("byte_order_mark", "\ufeff"),
        ("nul", "\0"),
        ("form_feed", "\f"),
        ("no_break_space", "\u00a0"),
        ("comma", ","),
        ("comment", "/**/"),
    ):
        yield f"{name}_before", file_of(before + good)
        yield f"{name}_after", file_of(good + before)
        yield f"{name}_inside", file_of("{" + before + good[1:])
    for name, text in (
        ("two_objects", good + good),
        ("brace_after", good + "}"),
        ("brace_missing", good[:-1]),
        ("comma_at_the_end", f'{{"a":{ENTRY},}}'),
        ("comma_missing", f'{{"a":{ENTRY}"b":{ENTRY}}}'),
        ("colon_missing", f'{{"a"{ENTRY}}}'),
        ("colon_twice", f'{{"a"::{ENTRY}}}'),
        ("bracket_for_brace", f'{{"a":{ENTRY}]'),
        ("key_without_quotes", f"{{a:{ENTRY}}}"),
        ("key_is_a_number", f"{{1:{ENTRY}}}"),
        ("single_quotes", good.replace('"', "'")),
        ("spread_over_lines", good.replace(",", " ,\n").replace(":", "\t: ").replace("{", "{\r ")),
        ("utf_16", good.encode("utf-16-le")),
    ):
        yield name, file_of(text)
    for name, text in (
        ("no_tensors", "{}"),
        ("no_tensors_spaces", "{ }   "),
        ("empty_header", ""),
        ("only_spaces", "    "),
        ("only_brace", "{"),
        ("header_null", "null"),
        ("header_list", "[]"),
        ("header_list_of_fields", "[null,{}]"),
        ("header_string", '"a"'),
        ("header_number", "0"),
        ("header_nuls", b"\0\0\0\0"),
    ):
        yield name, file_of(text, 0)
    yield "no_tensors_but_bytes", file_of("{}", 1)


def metadata():
    for name, text in (
        ("null", "null"),
        ("empty", "{}"),
        ("one", '{"format":"pt"}'),
        ("order", '{"b":"1","a":"2","c":"3"}'),
        ("key_twice", '{"a":"1","a":"2"}'),
        ("empty_key", '{"":""}'),
        ("number", '{"a":1}'),
        ("null_value", '{"a":null}'),
        ("list_value", '{"a":[]}'),
        ("object_value", '{"a":{}}'),
        ("bool_value", '{"a":true}'),
        ("list", "[]"),
        ("list_of_pairs", '[["a","b"]]'),
        ("string", '"a"'),
        ("is_true", "true"),
        ("is_nul", "nul"),
        ("is_nulls", "nulls"),
        ("is_a_tensor", ENTRY),
        ("comma_at_the_end", '{"a":"b",}'),
        ("escapes", r'{"\u0061\n":"\"\\\/\b\f\n\r\t\u00e9"}'),
        ("deep", '{"a":' * 200 + '"b"' + "}" * 200),
        ("checksums", r'{"tensorferry.xxh3":"{\"a\":\"0123456789abcdef\"}"}'),
    ):
        yield f"metadata_{name}", file_of(f'{{"__metadata__":{text},"a":{ENTRY}}}')
    one = '"__metadata__":{"a":"b"}'
    yield "metadata_alone", file_of(f"{{{one}}}", 0)
    yield "metadata_last", file_of(f'{{"a":{ENTRY},{one}}}')
    yield "metadata_twice", file_of(f'{{{one},{one},"a":{ENTRY}}}')
    yield "metadata_null_twice", file_of('{"__metadata__":null,"__metadata__":null}', 0)
    yield "metadata_null_then_object", file_of(f'{{"__metadata__":null,{one}}}', 0)
    yield "metadata_escaped_key", file_of(r'{"__metad\u0061ta__":{"a":"b"}}', 0)
    yield "metadata_twice_escaped", file_of(rf'{{{one},"__metad\u0061ta__":{{}}}}', 0)
    yield "metadata_other_case", file_of('{"__METADATA__":{"a":"b"}}', 0)


def repeated():
    too_long = entry(shape="[3]", offsets="[0,12]")
    unknown = entry(dtype='"F99"')
    for name, text in (
        ("tensor_twice", f'"a":{ENTRY},"a":{ENTRY}'),
        ("tensor_twice_escaped", rf'"a":{ENTRY},"\u0061":{ENTRY}'),
        ("tensor_twice_first_too_long", f'"a":{too_long},"a":{ENTRY}'),
        ("tensor_twice_last_too_long", f'"a":{ENTRY},"a":{too_long}'),
        ("tensor_twice_first_unknown", f'"a":{unknown},"a":{ENTRY}'),
        ("tensor_twice_first_null", f'"a":null,"a":{ENTRY}'),
        ("tensor_thrice", f'"a":{ENTRY},"a":{entry(offsets="[4,8]")},"a":{ENTRY}'),
        ("dtype_twice", f'"a":{ENTRY[:-1]},"dtype":"F32"}}'),
        ("shape_twice", f'"a":{ENTRY[:-1]},"shape":[2]}}'),
        ("data_offsets_twice", f'"a":{ENTRY[:-1]},"data_offsets":[0,8]}}'),
        ("unknown_field_twice", f'"a":{ENTRY[:-1]},"z":0,"z":0}}'),
    ):
        yield name, file_of("{" + text + "}")


def entries():
    """One tensor."""
    for name, text in (
        ("fields_in_another_order", '{"shape":[2],"data_offsets":[0,8],"dtype":"F32"}'),
        ("dtype_missing", '{"shape":[2],"data_offsets":[0,8]}'),
        ("shape_missing", '{"dtype":"F32","data_offsets":[0,8]}'),
        ("data_offsets_missing", '{"dtype":"F32","shape":[2]}'),
        ("field_of_another_case", ENTRY.replace("dtype", "Dtype")),
        ("field_escaped", ENTRY.replace("dtype", r"\u0064type")),
        ("entry_empty", "{}"),
        ("entry_null", "null"),
        ("entry_true", "true"),
        ("entry_number", "1"),
        ("entry_string", '"F32"'),
        ("entry_list", '["F32",[2],[0,8]]'),
        ("entry_list_wrapped_dtype", '[{"F32":null},[2],[0,8]]'),
        ("entry_list_in_another_order", '[[2],"F32",[0,8]]'),
        ("entry_list_of_two", '["F32",[2]]'),
        ("entry_list_of_four", '["F32",[2],[0,8],0]'),
        ("entry_list_of_four_null", '["F32",[2],[0,8],null]'),
        ("entry_list_empty", "[]"),
        ("dtype_wrapped", entry('{"F32":null}')),
        ("dtype_wrapped_escaped", entry(r'{"F\u00332":null}')),
        ("dtype_wrapped_unknown", entry('{"F33":null}')),
        ("dtype_wrapped_list", entry('{"F32":[]}')),
        ("dtype_wrapped_object", entry('{"F32":{}}')),
        ("dtype_wrapped_true", entry('{"F32":true}')),
        ("dtype_wrapped_number", entry('{"F32":0}')),
        ("dtype_wrapped_string", entry('{"F32":""}')),
        ("dtype_wrapped_two", entry('{"F32":null,"F32":null}')),
        ("dtype_wrapped_none", entry("{}")),
        ("dtype_number", entry("17")),
        ("dtype_null", entry("null")),
        ("dtype_true", entry("true")),
        ("dtype_list", entry('["F32"]')),
        ("dtype_escaped", entry(r'"F\u00332"')),
        ("shape_null", entry(shape="null")),
        ("shape_number", entry(shape="2")),
        ("shape_string", entry(shape='"2"')),
        ("shape_object", entry(shape='{"0":2}')),
        ("shape_of_lists", entry(shape="[[2]]")),
        ("shape_of_null", entry(shape="[null]")),
        ("shape_comma_at_the_end", entry(shape="[2,]")),
        ("shape_comma_first", entry(shape="[,2]")),
        ("shape_without_comma", entry(shape="[1 2]")),
        ("shape_open", entry(shape="[2")),
        ("shape_wrong", entry(shape="[3]")),
        ("shape_of_ones", entry(shape="[1,1,2,1,1]")),
        ("shape_of_many_ones", entry(shape="[2" + ",1" * 500 + "]")),
        ("shape_as_private_number", entry(shape='[{"$serde_json::private::Number":"2"}]')),
        ("offsets_of_one", entry(offsets="[0]")),
        ("offsets_of_three", entry(offsets="[0,8,8]")),
        ("offsets_of_none", entry(offsets="[]")),
        ("offsets_null", entry(offsets="null")),
        ("offsets_object", entry(offsets='{"0":0,"1":8}')),
        ("offsets_negative", entry(offsets="[-0,8]")),
        ("offsets_float", entry(offsets="[0,8.0]")),
        ("offsets_exponent", entry(offsets="[0,8e0]")),
        ("offsets_strings", entry(offsets='["0","8"]')),
        ("offsets_reversed", entry(offsets="[8,0]")),
        (
            "offsets_at_the_end_of_64_bits",
            entry(offsets="[18446744073709551608,18446744073709551615]"),
        ),
    ):
        yield name, file_of(f'{{"a":{text}}}')


def dtypes():
    for dtype, bits in DTYPES.items():
        yield f"dtype_{dtype}", file_of("{" + tensor("a", dtype, [8], 0, bits) + "}", bits)
        yield f"dtype_{dtype}_one", file_of("{" + tensor("a", dtype, [1], 0, 1) + "}", 1)
    for dtype in ("", "f32", "F32 ", "float32", "F128", "I4", "U4", "C128", "F8", "BOOLEAN", "0"):
        yield (
            f"dtype_unknown_{dtype.strip()}_{len(dtype)}",
            file_of(f'{{"a":{entry(chr(34) + dtype + chr(34))}}}'),
        )
    for dtype, count, size in (
        ("F4", 2, 1), ("F4", 3, 1), ("F4", 3, 2), ("F4", 0, 0), ("F6_E2M3", 4, 3),
        ("F6_E3M2", 3, 2), ("F6_E3M2", 3, 3), ("F6_E2M3", 2, 1), ("F6_E2M3", 2, 2),
    ):  # fmt: skip
        name = f"packed_{dtype}_{count}_in_{size}"
        yield name, file_of("{" + tensor("a", dtype, [count], 0, size) + "}", size)


def numbers():
    """Each as a size, where it counts, and in a field that nobody reads."""
    for number in (
        "0", "2", "02", "00", "+2", "-0", "-1", "-2", "-", "--1", "2.", ".2", "2.0", "1.0", "-0.0",
        "2e0", "2E0", "2e+0", "2e-0", "1e3", "2e", "2e+", "e2", "0x2", "2_0", "2f", "NaN", "inf",
        "18446744073709551615", "18446744073709551616", "18446744073709551616.0",
        "9223372036854775808", "-9223372036854775808", "-9223372036854775809",
        "184467440737095516150", "1e19", "1e308", "1.7976931348623157e308",
        "1.7976931348623158e308", "1.7976931348623159e308", "1.797693134862315808e308",
        "17976931348623157e292", "17976931348623158e292", "179769313486231571e291",
        "179769313486231581e291", "1.8e308", "1e309", "-1e309", "0.1e309", "0.01e310", "10e308",
        "0e309", "0.0e999", "1e-309", "1e-400", "1e400", "1e2147483647", "1e2147483648",
        "1e-2147483648", "1e99999999999", "0e99999999999", "-0e99999999999", "1e-99999999999",
        "0." + "0" * 400 + "1e400", "0." + "0" * 400 + "1e708", "0." + "0" * 400 + "1e710",
        "1" + "0" * 308, "1" + "0" * 309, "1" + "0" * 400 + "e-200", "9" * 308, "9" * 309,
        "1" * 19 + "." + "1" * 400, "0." + "9" * 400 + "e309", "18446744073709551616.5e289",
        "true", "false", "null", "tru", "nulll", "True", '"2"', "[2]", "{}", "",
    ):  # fmt: skip
        label = number if len(number) < 32 else f"{number[:8]}__{number[-8:]}_{len(number)}"
        yield f"size_{label}", file_of(f'{{"a":{entry(shape=f"[{number}]")}}}')
        yield f"ignored_{label}", with_field(number)


def nesting():
    for depth in (1, 2, 100, 124, 125, 126, 127, 128, 129, 1000, 20000):
        yield f"lists_{depth}", with_field("[" * depth + "]" * depth)
        yield f"objects_{depth}", with_field('{"a":' * depth + "0" + "}" * depth)
    yield "lists_open", with_field("[" * 100)
    yield "lists_crossed", with_field("[{]}")
    yield "lists_mixed", with_field('[{"a":[{},[],{"b":[null,true,false,0,"x"]}]},[[]]]')
    yield "lists_commas", with_field("[,]")
    yield "objects_without_value", with_field('{"a"}')
    yield "objects_without_key", with_field("{:1}")
    yield "top_lists", file_of("[" * 1000, 0)
    yield "top_objects", file_of('{"a":' * 1000, 0)


def strings():
    """Each as a name, as metadata, and in fields that nobody reads."""
    for label, text in (
        ("high_surrogate", r"\ud800"),
        ("low_surrogate", r"\udc00"),
        ("pair", r"\ud800\udc00"),
        ("pair_of_other_case", r"\uD83D\uDe00"),
        ("last_pair", r"\udbff\udfff"),
        ("high_and_text", r"\ud800x"),
        ("high_and_escape", r"\ud800\n"),
        ("high_and_high", r"\ud800\ud800"),
        ("high_and_letter", r"\udbff\u0041"),
        ("high_and_half", r"\ud800\udc0"),
        ("nul", r"\u0000"),
        ("bad_hex", r"\u00zz"),
        ("signed_hex", r"\u+041"),
        ("short_hex", r"\u12"),
        ("x", r"\x41"),
        ("big_u", r"\U0041"),
        ("single_quote", r"\'"),
        ("slash", r"\/"),
        ("all_short", r"\b\f\n\r\t\"\\"),
        ("backslash_at_the_end", "\\"),
        ("raw_nul", "\0"),
        ("raw_control", "\x01"),
        ("raw_line", "\n"),
        ("raw_tab", "\t"),
        ("raw_unit_separator", "\x1f"),
        ("raw_delete", "\x7f"),
        ("raw_line_separator", "\u2028"),
        ("not_ascii", "é€😀"),
        ("empty", ""),
        ("long", "x" * 3000),
        ("surrogate_in_utf8", b"\xed\xa0\x80"),
        ("before_surrogates", b"\xed\x9f\xbf"),
        ("overlong_two", b"\xc0\x80"),
        ("overlong_three", b"\xe0\x80\x80"),
        ("overlong_four", b"\xf0\x80\x80\x80"),
        ("beyond_unicode", b"\xf4\x90\x80\x80"),
        ("last_of_unicode", b"\xf4\x8f\xbf\xbf"),
        ("five_bytes", b"\xf8\x88\x80\x80\x80"),
        ("lone_tail", b"\x80"),
        ("cut_two", b"\xc3"),
        ("cut_three", b"\xe2\x82"),
        ("cut_four", b"\xf0\x9f\x98"),
        ("latin_1", b"\xe9"),
        ("ff", b"\xff"),
    ):
        raw = text if isinstance(text, bytes) else text.encode()
        good = ENTRY.encode()
        yield f"name_{label}", file_of(b'{"' + raw + b'":' + good + b"}")
        yield f"text_{label}", file_of(b'{"__metadata__":{"' + raw + b'":"' + raw + b'"}}', 0)
        yield f"value_{label}", file_of(b'{"a":' + good[:-1] + b',"z":"' + raw + b'"}}')
        yield f"key_{label}", file_of(b'{"a":' + good[:-1] + b',"' + raw + b'":0}}')
    yield "not_utf8_after_the_end", file_of(b'{"a":' + ENTRY.encode() + b"}\xff")
    yield "string_open", file_of('{"a')
    yield "escape_open", file_of('{"a\\')
    yield "hex_open", file_of('{"a\\u00')


def places():
    """Several tensors, and where they lie."""
    f32, u8 = "F32", "U8"
    for name, data_bytes, *tensors in (
        ("one_behind_the_other", 12, ("a", f32, [2], 0, 8), ("b", f32, [1], 8, 12)),
        ("listed_backwards", 12, ("b", f32, [1], 8, 12), ("a", f32, [2], 0, 8)),
        ("not_aligned", 9, ("a", u8, [1], 0, 1), ("b", f32, [2], 1, 9)),
        ("no_elements_first", 8, ("a", f32, [0], 0, 0), ("b", f32, [2], 0, 8)),
        ("no_elements_between", 8, ("a", f32, [1], 0, 4), ("z", f32, [0], 4, 4),
         ("c", f32, [1], 4, 8)),
        ("no_elements_last", 8, ("b", f32, [2], 0, 8), ("a", f32, [0], 8, 8)),
        ("no_elements_inside_another", 8, ("b", f32, [2], 0, 8), ("a", f32, [0], 4, 4)),
        ("no_elements_beyond_the_end", 8, ("b", f32, [2], 0, 8), ("a", f32, [0], 9, 9)),
        ("no_elements_alone", 0, ("a", f32, [0], 0, 0)),
        ("no_elements_of_many", 0, ("a", f32, [0, 2**63, 2**63], 0, 0)),
        ("no_elements_after_overflow", 0, ("a", f32, [2**63, 2**63, 0], 0, 0)),
        ("no_elements_with_bytes", 4, ("a", f32, [0], 0, 4)),
        ("scalar", 4, ("a", f32, [], 0, 4)),
        ("scalar_without_bytes", 0, ("a", f32, [], 0, 0)),
        ("same_bytes", 8, ("a", f32, [2], 0, 8), ("b", f32, [2], 0, 8)),
        ("overlap", 12, ("a", f32, [2], 0, 8), ("b", f32, [2], 4, 12)),
        ("one_inside_another", 12, ("a", f32, [3], 0, 12), ("b", f32, [1], 4, 8)),
        ("hole_first", 8, ("a", f32, [1], 4, 8)),
        ("hole_between", 12, ("a", f32, [1], 0, 4), ("b", f32, [1], 8, 12)),
        ("hole_last", 9, ("a", f32, [2], 0, 8)),
        ("data_cut", 7, ("a", f32, [2], 0, 8)),
        ("data_gone", 0, ("a", f32, [2], 0, 8)),
        ("one_byte_more_than_the_shape", 9, ("a", f32, [2], 0, 9)),
        ("one_byte_less_than_the_shape", 7, ("a", f32, [2], 0, 7)),
        ("elements_overflow", 8, ("a", f32, [2**32, 2**32], 0, 8)),
        ("elements_overflow_to_the_size", 8, ("a", f32, [2**63 + 1, 2], 0, 8)),
        ("bits_overflow", 8, ("a", f32, [2**59], 0, 8)),
        ("bits_overflow_to_zero", 0, ("a", u8, [2**61], 0, 0)),
        ("bits_overflow_to_the_size", 8, ("a", u8, [2**61 + 8], 0, 8)),
        ("as_large_as_bits_go", 8, ("a", u8, [2**61 - 1], 0, 2**61 - 1)),
        ("all_of_64_bits", 8, *((f"a{i}", u8, [2**61 - 1], i * (2**61 - 1), (i + 1) * (2**61 - 1))
                                for i in range(8)), ("b", u8, [7], 2**64 - 8, 2**64 - 1)),
    ):  # fmt: skip
        yield name, file_of("{" + ",".join(tensor(*one) for one in tensors) + "}", data_bytes)


def cases():
    """The bytes of each file by its name."""
    found = {}
    for group in (
        lengths, frames, metadata, repeated, entries, dtypes, numbers, nesting, strings, places
    ):  # fmt: skip
        for name, content in group():
            assert name not in found, name
            found[name] = content
    return found


def good_files():
    """Files to spoil: with all that a good header can have."""
    yield file_of("{" + tensor("a", "F32", [2], 0, 8) + "}")
    yield file_of(
        '{"__metadata__":{"format":"pt","a\\n":"\\u00e9"},'
        + ",".join(
            [
                tensor("layers.0.weight", "BF16", [2, 2], 0, 8),
                tensor("layers.0.bias", "F32", [1], 8, 12),
                tensor("é", "F4", [2, 3], 12, 15),
                tensor("z", "U8", [0], 15, 15),
            ]
        )
        + "}   ",
        15,
    )
    yield file_of(
        '{"a":["U8",[1,3],[0,3]],"b":{"dtype":{"I8":null},"shape":[],"data_offsets":[3,4]}}', 4
    )
    yield with_field('[1.5e3,-7,{"k":"\\ud83d\\ude00"},true,false,null]')


# What mutations put in place of bytes: the words of headers, and what is near to them.
PIECES = [
    *('{', '}', '[', ']', ',', ':', '"', '\\', ' ', '\n', '0', '1', '8', '9', '-', '.', 'e', 'E'),
    *('null', 'true', 'false', 'dtype', 'shape', 'data_offsets', '__metadata__', '"a":', '"F32"'),
    *('[]', '{}', '""', '[0,8]', '[2]', '1e309', '18446744073709551616', '\\u0061', '\\ud800'),
    *('\0', '\x1f', 'é', ENTRY, f',"b":{ENTRY}', ',"z":0', '"__metadata__":{"a":"b"},'),
]  # fmt: skip


def mutations(count, seed):
    """Good files, each with one to three random changes. Most keep the length field right."""
    choose = random.Random(seed)
    good = list(good_files())
    for _ in range(count):
        content = choose.choice(good)
        length = struct.unpack("<Q", content[:8])[0]
        header, data = bytearray(content[8 : 8 + length]), content[8 + length :]
        for _ in range(choose.randint(1, 3)):
            at = choose.randrange(len(header) + 1)
            until = at + choose.choice([0, 0, 1, 1, 2, 5])
            piece = choose.choice(PIECES).encode()
            kind = choose.randrange(5)
            if kind == 0:
                header[at:until] = piece
            elif kind == 1:
                del header[at:until]
            elif kind == 2:
                header[at:at] = piece
            elif kind == 3 and at < len(header):
                header[at] ^= 1 << choose.randrange(8)
            else:
                numbers = [i for i, byte in enumerate(header) if chr(byte).isdigit()]
                if numbers:
                    header[choose.choice(numbers)] = ord(choose.choice("0123456789"))
        if choose.randrange(20) == 0:
            length = max(0, len(header) + choose.randint(-3, 3))
        else:
            length = len(header)
        if choose.randrange(20) == 0:
            data = data[: choose.randrange(len(data) + 1)] + bytes(choose.randrange(2))
        yield struct.pack("<Q", length) + bytes(header) + data


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for number, content in enumerate(cases().values()):
        (folder / f"case-{number:03}").write_bytes(content)
