//! Malformed headers are refused by name; laid-out headers are parsed back unchanged.

use proptest::prelude::*;

use super::*;

/// Parses a header text that is followed by `data_len` bytes.
fn parse(text: &str, data_len: u64) -> Result<Header, Fault> {
    Header::parse(text.as_bytes(), 8 + text.len() as u64 + data_len)
}

fn fault(text: &str, data_len: u64) -> String {
    parse(text, data_len).expect_err("the header is malformed").to_string()
}

fn name(text: &str) -> String {
    text.to_owned()
}

#[test]
fn reads_header_in_any_order_with_empty_and_scalar_tensors() {
    let text = r#"{"b":{"dtype":"I64","shape":[],"data_offsets":[4,12]},
        "__metadata__":{"format":"pt"},
        "e":{"shape":[0,3],"data_offsets":[4,4],"dtype":"F32"},
        "a":{"dtype":"BF16","shape":[2,1],"data_offsets":[0,4]}}   "#;
    let header = parse(text, 12).unwrap();
    let names: Vec<&str> = header.entries().iter().map(TensorEntry::name).collect();
    assert_eq!(names, ["a", "e", "b"]);
    assert_eq!(header.metadata().unwrap()["format"], "pt");
    let scalar = header.entry("b").unwrap();
    assert_eq!((scalar.row_count(), scalar.row_bytes(), scalar.row_len()), (1, 8, 1));
    assert_eq!(header.file_len(), 8 + text.len() as u64 + 12);
}

#[test]
fn reads_file_without_tensors() {
    assert_eq!(parse("{}", 0).unwrap().entries(), []);
}

#[test]
fn rejects_file_without_header_length() {
    let expected = "it has 3 bytes, too few for the 8-byte header length";
    assert_eq!(Header::parse_length(&[1, 0, 0], 3), Err(Fault::new(expected)));
}

#[test]
fn rejects_header_above_limit() {
    let len = HEADER_LEN_MAX + 1;
    let expected = |len: u64| {
        Fault::new(format!(
            "it does not begin with the length of a header (its first 8 bytes say {len}, more than the 100000000 that the format \
             allows)"
        ))
    };
    assert_eq!(Header::parse_length(&len.to_le_bytes(), u64::MAX), Err(expected(100_000_001)));
    assert_eq!(Header::parse_length(&[0xff; 8], 8), Err(expected(u64::MAX)));
}

#[test]
fn rejects_header_beyond_end_of_file() {
    let expected = "its header needs 100 bytes, but the file has only 20 after the header length";
    assert_eq!(Header::parse_length(&100_u64.to_le_bytes(), 28), Err(Fault::new(expected)));
}

#[test]
fn rejects_non_object_header() {
    for text in ["[]", " []", ""] {
        assert_eq!(fault(text, 0), "its header does not begin with `{`");
    }
}

#[test]
fn rejects_invalid_utf8() {
    assert_eq!(Header::parse(b"{\"\xff\"}", 13), Err(Fault::at(10, "its header is not UTF-8")));
}

#[test]
fn rejects_broken_json() {
    for text in ["{", "{\"a\"", "{} x", "{}{}", "{\"a\":", "{,}", "{\u{0}}"] {
        let found = fault(text, 0);
        let is_named = found.starts_with("its header is not valid JSON: ")
            || found.starts_with("the entry of tensor `a` cannot be read: ");
        assert!(is_named, "{text}: {found}");
    }
}

#[test]
fn rejects_deep_nesting() {
    let text = format!("{{\"a\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(fault(&text, 0).starts_with("the entry of tensor `a` cannot be read: "));
}

#[test]
fn rejects_repeated_tensor() {
    let entry = r#""a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    let found = fault(&format!("{{{entry},{entry}}}"), 1);
    assert_eq!(found, "its header lists `a` twice");
    // The same name, once with an escape sequence.
    let escaped = entry.replace("\"a\"", "\"\\u0061\"");
    let found = fault(&format!("{{{entry},{escaped}}}"), 1);
    assert_eq!(found, "its header lists `a` twice");
}

#[test]
fn rejects_repeated_metadata() {
    let found = fault(r#"{"__metadata__":{},"__metadata__":{}}"#, 0);
    assert_eq!(found, "its header lists `__metadata__` twice");
    let found = fault(r#"{"__metadata__":{"k":"1","k":"2"}}"#, 0);
    assert!(found.starts_with("its `__metadata__` is not a map") && found.contains("`k`"), "{found}");
}

#[test]
fn rejects_non_text_metadata() {
    for value in ["{\"k\":1}", "{\"k\":{}}", "{\"k\":null}", "[]"] {
        let found = fault(&format!("{{\"__metadata__\":{value}}}"), 0);
        assert!(found.starts_with("its `__metadata__` is not a map"), "{value}: {found}");
    }
}

#[test]
fn rejects_repeated_field() {
    let found = fault(r#"{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, 1);
    assert!(found.starts_with("the entry of tensor `a` cannot be read: duplicate field `dtype`"), "{found}");
}

#[test]
fn null_metadata_is_none() {
    let text = r#"{"__metadata__":null,"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    let header = parse(text, 1).unwrap();
    assert_eq!((header.metadata(), header.entries().len()), (None, 1));
    assert_eq!(
        fault(r#"{"__metadata__":null,"__metadata__":{}}"#, 0),
        "its header lists `__metadata__` twice"
    );
}

#[test]
fn unknown_fields_are_ignored() {
    let plain = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    let expected = parse(plain, 1).unwrap();
    for extra in [r#""strides":[1]"#, r#""x":null"#, r#""x":{"y":[1,{"z":2}]}"#, r#""x":1,"x":2"#] {
        let text = format!(r#"{{"a":{{"dtype":"U8",{extra},"shape":[1],"data_offsets":[0,1]}}}}"#);
        assert_eq!(parse(&text, 1).unwrap().entries(), expected.entries(), "{extra}");
    }
}

/// The rule of the reference implementation: the bits of all values fill whole bytes. Here the values of a row must.
#[test]
fn packed_types_need_rows_of_whole_bytes() {
    for (name, bits) in [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6)] {
        for (rows, values) in (0..4_u64).flat_map(|rows| (0..9).map(move |values| (rows, values))) {
            let bytes = (rows * values * bits).div_ceil(8);
            let text = format!(
                r#"{{"a":{{"dtype":"{name}","shape":[{rows},{values}],"data_offsets":[0,{bytes}]}}}}"#
            );
            let group = if bits == 4 { 2 } else { 4 };
            match parse(&text, bytes) {
                Ok(header) => {
                    let [entry] = header.entries() else { panic!("one tensor") };
                    assert_eq!(values % group, 0, "{text}");
                    assert_eq!(entry.shape(), [rows as usize, (values / group) as usize]);
                    assert_eq!(entry.row_bytes(), values * bits / 8);
                }
                Err(fault) => {
                    assert_ne!(values % group, 0, "{text}: {fault}");
                    assert!(fault.to_string().contains(&format!("multiple of {group}")), "{fault}");
                }
            }
        }
    }
    assert!(fault(r#"{"a":{"dtype":"F4","shape":[],"data_offsets":[0,1]}}"#, 1).contains("multiple of 2"));
    let written = Header::layout(vec![spec("a", TensorType::F4, &[])], None).unwrap_err();
    assert!(written.to_string().contains("multiple of 2"), "{written}");
}

#[test]
fn rejects_missing_field() {
    for (field, text) in [
        ("dtype", r#"{"a":{"shape":[1],"data_offsets":[0,1]}}"#),
        ("shape", r#"{"a":{"dtype":"U8","data_offsets":[0,1]}}"#),
        ("data_offsets", r#"{"a":{"dtype":"U8","shape":[1]}}"#),
    ] {
        let expected = format!("the entry of tensor `a` cannot be read: missing field `{field}`");
        assert!(fault(text, 1).starts_with(&expected), "{field}");
    }
}

#[test]
fn rejects_unknown_dtype() {
    let found = fault(r#"{"a":{"dtype":"F7","shape":[2],"data_offsets":[0,1]}}"#, 1);
    assert!(found.starts_with("tensor `a` has dtype `F7`; supported are BOOL, U8"), "{found}");
}

#[test]
fn rejects_fields_of_wrong_type() {
    let many = "1,".repeat(64) + "1";
    for fields in [
        r#""dtype":3,"shape":[1],"data_offsets":[0,1]"#,
        r#""dtype":"U8","shape":1,"data_offsets":[0,1]"#,
        r#""dtype":"U8","shape":[-1],"data_offsets":[0,1]"#,
        r#""dtype":"U8","shape":[1.0],"data_offsets":[0,1]"#,
        r#""dtype":"U8","shape":["1"],"data_offsets":[0,1]"#,
        r#""dtype":"U8","shape":[NaN],"data_offsets":[0,1]"#,
        r#""dtype":"U8","shape":[1],"data_offsets":[0]"#,
        r#""dtype":"U8","shape":[1],"data_offsets":[0,1,2]"#,
        r#""dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551616]"#,
        &format!(r#""dtype":"U8","shape":[{many}],"data_offsets":[0,1]"#),
    ] {
        let found = fault(&format!("{{\"a\":{{{fields}}}}}"), 1);
        assert!(found.starts_with("the entry of tensor `a` cannot be read: "), "{fields}: {found}");
    }
}

#[test]
fn rejects_reversed_offsets() {
    let found = fault(r#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[1,0]}}"#, 1);
    assert_eq!(found, "tensor `a` has data offsets 1..0, which run backwards");
}

#[test]
fn rejects_truncated_file() {
    let found = fault(r#"{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}"#, 8);
    assert_eq!(found, "tensor `a` ends at data byte 9, but the file holds only 8 (truncated?)");
}

#[test]
fn rejects_hole_before_tensor() {
    let found = fault(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#, 2);
    assert_eq!(found, "data bytes 0..1 before tensor `a` belong to no tensor");
}

#[test]
fn rejects_overlapping_tensors() {
    let text = r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},
        "b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}"#;
    assert_eq!(fault(text, 4), "tensor `b` starts at data byte 2, inside `a`, which ends at 3");
    let shared = text.replace("[2,4]", "[0,3]").replace("[2]", "[3]");
    assert!(fault(&shared, 3).contains("starts at data byte 0, inside `"));
}

#[test]
fn rejects_range_of_wrong_size() {
    let found = fault(r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,7]}}"#, 7);
    assert_eq!(found, "tensor `a` (F32 [2]) needs 8 bytes, but its offsets span 7");
}

#[test]
fn rejects_overflowing_size() {
    for shape in [
        "[4294967296,4294967296]",
        "[4294967296,4294967296,0]",
        "[2,4294967296,4294967296]",
        "[18446744073709551615]",
    ] {
        let text = format!(r#"{{"a":{{"dtype":"F64","shape":{shape},"data_offsets":[0,0]}}}}"#);
        assert!(fault(&text, 0).ends_with("has more bytes than can be counted"), "{shape}");
    }
}

/// After a dimension of 0, the reference implementation allows any other.
#[test]
fn empty_tensor_may_have_rows_of_any_size() {
    let max = usize::MAX;
    for shape in [[0, 1 << 62, 1 << 62], [0, max, max], [2, 0, max], [max, 0, max], [1 << 62, 0, 3]] {
        let text = format!(
            r#"{{"z":{{"dtype":"F64","shape":{shape:?},"data_offsets":[0,0]}},"a":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#
        );
        let header = parse(&text, 1).unwrap();
        let entry = header.entry("z").unwrap();
        assert_eq!((entry.shape(), entry.data_range()), (&shape[..], 0..0));
        assert_eq!(entry.row_bytes() * entry.row_count() as u64, 0, "{shape:?}");
    }
}

#[test]
fn white_space_around_the_header_is_skipped() {
    let entry = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    let expected = parse(entry, 1).unwrap();
    for (before, after) in [(" ", ""), ("", " \n"), ("\t\r\n  ", "   ")] {
        assert_eq!(parse(&format!("{before}{entry}{after}"), 1).unwrap().entries(), expected.entries());
    }
    for wrong in ["\u{b}", "\u{c}", "\u{a0}", "\u{feff}", "\0", ","] {
        parse(&format!("{wrong}{entry}"), 1).unwrap_err();
        parse(&format!("{entry}{wrong}"), 1).unwrap_err();
    }
}

#[test]
fn rejects_bytes_after_last_tensor() {
    let found = fault(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, 2);
    assert_eq!(found, "its tensors end at data byte 1, but the file holds 2");
    assert_eq!(fault("{}", 1), "its tensors end at data byte 0, but the file holds 1");
}

fn spec(name: &str, dtype: TensorType, shape: &[usize]) -> TensorSpec {
    TensorSpec { name: name.to_owned(), dtype, shape: shape.to_owned() }
}

#[test]
fn layout_rejects_reserved_repeated_and_oversized_tensors() {
    let layout = |tensors| Header::layout(tensors, None).map(|_| ()).unwrap_err().to_string();
    let twice = vec![spec("a", TensorType::U8, &[1]), spec("a", TensorType::U8, &[2])];
    assert_eq!(layout(twice), "its header lists `a` twice");
    let reserved = layout(vec![spec("__metadata__", TensorType::U8, &[])]);
    assert_eq!(reserved, "a tensor cannot be named `__metadata__`; rename it");
    let huge = |name| spec(name, TensorType::U8, &[usize::MAX / 2]);
    let too_large = "has more bytes than can be counted";
    assert!(layout(vec![huge("a"), huge("b"), huge("c")]).ends_with(too_large));
    assert!(layout(vec![spec("a", TensorType::U8, &[usize::MAX])]).ends_with(too_large));
}

#[test]
fn layout_bytes_are_canonical() {
    let metadata = Metadata::from([(name("k"), name("v"))]);
    let tensors = vec![spec("b", TensorType::F16, &[2, 3]), spec("a\"", TensorType::Bool, &[])];
    let (header, bytes) = Header::layout(tensors, Some(metadata)).unwrap();
    let text = concat!(
        r#"{"__metadata__":{"k":"v"},"b":{"dtype":"F16","shape":[2,3],"data_offsets":[0,12]},"#,
        r#""a\"":{"dtype":"BOOL","shape":[],"data_offsets":[12,13]}}"#
    );
    assert_eq!(std::str::from_utf8(&bytes[8..]).unwrap().trim_end_matches(' '), text);
    assert_eq!(bytes.len() as u64, header.data_start());
    assert_eq!(bytes.len() % 8, 0);
}

fn tensor_type() -> impl Strategy<Value = TensorType> {
    proptest::sample::select(TensorType::all().collect::<Vec<_>>())
}

fn specs() -> impl Strategy<Value = Vec<TensorSpec>> {
    let tensor = (".{0,6}", tensor_type(), prop::collection::vec(0_usize..5, 0..4))
        .prop_filter("a packed tensor has a dimension", |(_, dtype, shape)| {
            dtype.values() == 1 || !shape.is_empty()
        });
    prop::collection::vec(tensor, 0..8).prop_map(|tensors| {
        let numbered = tensors.into_iter().enumerate();
        numbered
            .map(|(number, (name, dtype, shape))| TensorSpec {
                name: format!("{name}{number}"),
                dtype,
                shape,
            })
            .collect()
    })
}

proptest! {
    #[test]
    fn laid_out_header_round_trips(specs in specs(), metadata in prop::option::of(
        prop::collection::btree_map(".{0,5}", ".{0,5}", 0..3))) {
        let (header, bytes) = Header::layout(specs.clone(), metadata).unwrap();
        let len = Header::parse_length(&bytes, header.file_len()).unwrap();
        prop_assert_eq!(len as usize, bytes.len() - 8);
        let parsed = Header::parse(&bytes[8..], header.file_len()).unwrap();
        // Parsing sorts by offsets, so only empty tensors may change places with each other.
        for (spec, entry) in specs.iter().zip(header.entries()) {
            prop_assert_eq!(&entry.spec, spec);
            prop_assert_eq!(parsed.entry(&spec.name), Some(entry));
        }
        prop_assert_eq!(parsed.metadata(), header.metadata());
        prop_assert_eq!(parsed.entries().len(), specs.len());
        prop_assert_eq!(parsed.data_len(), header.data_len());
    }

    #[test]
    fn parser_never_panics_on_mutated_header(specs in specs(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let (header, mut bytes) = Header::layout(specs, None).unwrap();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok(len) = Header::parse_length(&bytes, header.file_len())
            && let Some(text) = bytes.get(8..8 + len as usize)
        {
            let _ = Header::parse(text, header.file_len());
        }
    }

    #[test]
    fn parser_never_panics_on_arbitrary_text(text in "[{}\\[\\]\",:a0-9 ]{0,60}", data_len in 0_u64..20) {
        let _ = parse(&text, data_len);
    }
}
