//! Handmade pickles: which are read, and which limits stop hostile ones.

use proptest::prelude::*;

use super::{limits::DEPTH_MAX, *};
use crate::checkpoint::{Global, Value};

/// A pickle of protocol 2 with this body.
fn pickle(body: &[u8]) -> Vec<u8> {
    [b"\x80\x02", body, b"."].concat()
}

fn read(body: &[u8]) -> Result<Value, Fault> {
    let graph = parse(&pickle(body))?;
    graph.value(graph.root(), &mut Budget::default())
}

fn fault(body: &[u8]) -> String {
    read(body).unwrap_err().to_string()
}

fn text(text: &str) -> Vec<u8> {
    [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
}

#[test]
fn reads_every_plain_value() {
    use Value::*;
    let cases: [(&[u8], Value); 18] = [
        (b"N", None),
        (b"\x88", Bool(true)),
        (b"\x89", Bool(false)),
        (b"K\x07", Int(7)),
        (b"M\x07\x01", Int(263)),
        (b"J\xff\xff\xff\xff", Int(-1)),
        (b"\x8a\x00", Int(0)),
        (b"\x8a\x01\xff", Int(-1)),
        (b"\x8a\x02\xff\x00", Int(255)),
        (b"\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80", Int(i64::MIN)),
        (b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\x00", Long(vec![0, 0, 0, 0, 0, 0, 0, 0x80, 0])),
        (b"G\x3f\xf8\x00\x00\x00\x00\x00\x00", Float(1.5)),
        (b"C\x02\x00\xff", Bytes(vec![0, 255])),
        (b"\x96\x01\0\0\0\0\0\0\0\x05", Bytes(vec![5])),
        (b"]", List(vec![])),
        (b"(K\x01K\x02t", Tuple(vec![Int(1), Int(2)])),
        (b"}(\x8c\x01aK\x01K\x02Nu", Dict(vec![(Str("a".into()), Int(1)), (Int(2), None)])),
        (b"ctorch\nfloat32\n", Global(self::Global { module: "torch".into(), name: "float32".into() })),
    ];
    for (body, value) in cases {
        assert_eq!(read(body), Ok(value), "{body:?}");
    }
}

#[test]
fn container_constructor_calls_become_containers() {
    use Value::*;
    let ordered = b"ccollections\nOrderedDict\n)R(X\x01\0\0\0aK\x01u}X\x09\0\0\0_metadataNsb";
    assert_eq!(read(ordered), Ok(Dict(vec![(Str("a".into()), Int(1))])));
    assert_eq!(read(b"c__builtin__\nset\n](K\x01K\x02e\x85R"), Ok(Set(vec![Int(1), Int(2)])));
    let encoded = [&b"c_codecs\nencode\n"[..], &text("\u{0}\u{ff}"), &text("latin1"), b"\x86R"].concat();
    assert_eq!(read(&encoded), Ok(Bytes(vec![0, 255])));
}

#[test]
fn memoized_list_is_filled_at_every_use() {
    use Value::*;
    let once = List(vec![Int(1)]);
    assert_eq!(read(b"]q\x00h\x00K\x01a\x86"), Ok(Tuple(vec![once.clone(), once])));
}

fn opaque(module: &str, name: &str) -> Value {
    Value::Opaque(Global { module: module.into(), name: name.into() })
}

#[test]
fn calls_of_unknown_globals_are_opaque_and_named() {
    let command = text("true");
    let cases: [(&[u8], &str, &str); 5] = [
        (b"cos\nsystem\n", "os", "system"),
        (b"cposix\nsystem\n", "posix", "system"),
        (b"c__builtin__\neval\n", "__builtin__", "eval"),
        (b"cbuiltins\nexec\n", "builtins", "exec"),
        (b"ctorch\nload\n", "torch", "load"),
    ];
    for (global, module, name) in cases {
        let call = [global, &command, b"\x85R"].concat();
        assert_eq!(read(&call), Ok(opaque(module, name)));
        let graph = parse(&pickle(&call)).unwrap();
        let refused = graph.first_unknown().unwrap().fault().to_string();
        assert!(refused.contains(&format!("`{module}.{name}` at byte 2")), "{refused}");
        assert_eq!(read(global), Ok(opaque(module, name)), "the name alone is no better");
    }
    let by_stack = [&text("os")[..], &text("system"), b"\x93", &command, b"\x85R"].concat();
    assert_eq!(read(&by_stack), Ok(opaque("os", "system")));
}

#[test]
fn objects_of_unknown_classes_are_opaque() {
    let object = opaque("m", "C");
    let bodies: [&[u8]; 8] = [
        b"cm\nC\n)\x81",
        b"cm\nC\n)\x81}b",
        b"cm\nC\n)\x81}bNb",
        b"cm\nC\n)R(K\x01K\x02e",
        b"cm\nC\n)RK\x01a",
        b"cm\nC\n)R(K\x01K\x02u",
        b"cm\nC\n)R(K\x01\x90",
        b"ccopyreg\n_reconstructor\ncm\nC\nN\x86R",
    ];
    for body in bodies {
        assert_eq!(read(body), Ok(object.clone()), "{body:?}");
    }
    let member = [&b"c__builtin__\ngetattr\ncm\nC\n"[..], &text("RED"), b"\x86R"].concat();
    assert_eq!(read(&member), Ok(opaque("m", "C.RED")));
    assert_eq!(read(b"ccollections\ndefaultdict\ncm\nC\n\x85R"), Ok(Value::Dict(vec![])));
    assert!(fault(b"cm\nC\nK\x01R").contains("a tuple of arguments"));
    assert!(fault(b"cm\nC\n}b").contains("an object that has a state"));
}

#[test]
fn opaque_objects_may_be_self_referential() {
    let body = b"cm\nC\n)\x81q\x00}q\x01(K\x01h\x00ub";
    assert_eq!(read(body), Ok(opaque("m", "C")));
    assert!(parse(&pickle(body)).unwrap().has_forgotten_parts());
    let beside = [b"(", &body[..], b"]q\x05h\x05at"].concat();
    assert_eq!(fault(&beside), "an object holds itself, directly or through others");
}

#[test]
fn rejects_inst_obj_and_ext_opcodes() {
    assert!(fault(b"(ios\nsystem\n").contains("INST"));
    assert!(fault(b"(cos\nsystem\no").contains("OBJ"));
    assert!(fault(b"(ccollections\nOrderedDict\no").contains("OBJ"));
    assert!(fault(b"\x82\x01").contains("EXT1"));
}

#[test]
fn known_globals_reject_unsupported_uses() {
    assert!(fault(b"ctorch\nfloat32\n)R").contains("`torch.float32` cannot be called"));
    assert!(fault(b"ctorch\nSize\n)\x81").contains("`torch.Size` cannot be instantiated"));
    assert!(fault(b"ctorch\nSize\n)\x85R}b").contains("given a state"));
    let getattr = [&b"c__builtin__\ngetattr\n"[..], &text("os"), &text("system"), b"\x86R"].concat();
    assert!(fault(&getattr).contains("called with these arguments"));
}

#[test]
fn filling_wrong_container_type_is_rejected() {
    assert!(fault(b"]K\x01K\x02s").contains("needs a dict but finds a list"));
    assert!(fault(b"}K\x01a").contains("needs a list but finds a dict"));
    assert!(fault(b"](K\x01\x90").contains("needs a set but finds a list"));
    assert!(fault(b"ccollections\nOrderedDict\nK\x01K\x02s").contains("a class or function"));
    assert!(fault(b"K\x01}b").contains("finds an integer"));
}

#[test]
fn rejects_self_referential_values() {
    assert_eq!(fault(b"]q\x00h\x00a"), "an object holds itself, directly or through others");
    assert_eq!(fault(b"}q\x00K\x01h\x00s"), "an object holds itself, directly or through others");
    assert_eq!(fault(b"]q\x00](h\x00ea"), "an object holds itself, directly or through others");
}

#[test]
fn rejects_deep_nesting_of_any_size() {
    let nested = |depth: usize| [&vec![b']'; depth][..], &vec![b'a'; depth - 1]].concat();
    assert!(read(&nested(DEPTH_MAX as usize)).is_ok());
    assert!(fault(&nested(DEPTH_MAX as usize + 1)).contains("levels of nesting"));
    assert!(fault(&nested(1_000_000)).contains("levels of nesting"));
}

#[test]
fn exponential_expansion_of_shared_parts_is_rejected() {
    // Each list holds the previous one ten times: a billion texts after nine steps.
    let mut body = [&text("ha"), &b"q\x00"[..]].concat();
    for step in 0..9u8 {
        body.push(b'(');
        for _ in 0..10 {
            body.extend([b'h', step]);
        }
        body.extend([b't', b'q', step + 1]);
    }
    let lists = [b"(", &body[..], b"t"].concat();
    let graph = parse(&pickle(&lists)).unwrap();
    let value = graph.value(graph.root(), &mut Budget::default());
    assert!(value.unwrap_err().to_string().starts_with("expanded, its shared parts need more than"));
}

#[test]
fn repeated_copying_of_call_arguments_is_rejected() {
    let mut body = b"(](".to_vec();
    body.extend([b'N'; 1000]);
    body.extend(b"eq\x00c__builtin__\nset\nq\x01");
    for _ in 0..1000 {
        body.extend(b"h\x01h\x00\x85R");
    }
    body.extend(b"t");
    assert!(fault(&body).contains("copied arguments"));
}

#[test]
fn oversized_lengths_are_rejected_before_allocation() {
    assert!(fault(b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff").contains("bytes in one value"));
    assert!(fault(b"B\xff\xff\xff\xff").contains("bytes in one value"));
    assert!(fault(b"X\x00\x00\x00\x08").contains("it ends inside a text"));
    assert!(fault(b"\x8b\xff\xff\xff\xff").contains("bytes in one value"));
}

#[test]
fn rejects_truncated_malformed_and_trailing_input() {
    let parsed = |bytes: &[u8]| parse(bytes).unwrap_err();
    assert_eq!(parsed(b""), Fault::at(0, "it ends inside the protocol"));
    for pickle in [&b"\x80\x06N."[..], b"(lp0\n."] {
        assert_eq!(parsed(pickle), Fault::unsupported("its protocol is not 2, 3, 4 or 5"));
    }
    assert_eq!(parsed(b"\x80\x02N.N"), Fault::at(4, "1 bytes follow its end"));
    for body in [&b"NN"[..], b"", b"N(a", b"}(K\x01u"] {
        let found = read(body).unwrap_err();
        assert!(
            found.to_string().starts_with("an opcode takes more from the stack than there is"),
            "{found}"
        );
    }
    assert_eq!(read(b"h\x07"), Err(Fault::at(2, "memo entry 7 is read before it is written")));
    assert_eq!(read(b"X\x01\0\0\0\xff"), Err(Fault::at(3, "a text is not UTF-8")));
}

#[test]
fn rejects_duplicate_keys() {
    let twice = [b"}(", &text("a")[..], b"N", &text("a"), b"Nu"].concat();
    assert_eq!(fault(&twice), "a dict has the key `a` twice");
    assert_eq!(fault(b"}(K\x01NK\x01Nu"), "a dict has the key `1` twice");
}

proptest! {
    #[test]
    fn parser_never_panics_on_random_bytes(
        body in proptest::collection::vec(
            prop_oneof![any::<u8>(), prop::sample::select(&b"(.]})Na\x65su\x85\x86\x87tqh\x94\x93RQb\x81K\x8c"[..])],
            0..60,
        ),
    ) {
        if let Ok(graph) = parse(&pickle(&body)) {
            let _ = graph.value(graph.root(), &mut Budget::default());
        }
    }
}
