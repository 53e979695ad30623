//! Metadata of arrays is read, or refused by the name of what is not.

use super::*;

const ZARR2: &str = r#"{"chunks":[2,3],"compressor":{"id":"zstd","level":1},"dimension_separator":".","dtype":"<f4",
    "fill_value":null,"filters":null,"order":"C","shape":[4,6],"zarr_format":2}"#;
const ZARR3: &str = r#"{"chunk_grid":{"configuration":{"chunk_shape":[2,4]},"name":"regular"},
    "chunk_key_encoding":{"name":"default"},"codecs":[{"configuration":{"chunk_shape":[2,2],"codecs":
    [{"configuration":{"endian":"little"},"name":"bytes"},{"configuration":{"level":3},"name":"zstd"}],"index_codecs":
    [{"configuration":{"endian":"little"},"name":"bytes"},{"name":"crc32c"}]},"name":"sharding_indexed"}],
    "data_type":"bfloat16","fill_value":0.0,"node_type":"array","shape":[4,8],"zarr_format":3}"#;

#[test]
fn arrays_of_both_versions_are_read() {
    let array = Array::of_zarr2(ZARR2.as_bytes()).unwrap();
    assert_eq!(
        (array.dtype, &array.shape[..], &array.chunk[..]),
        (TensorType::F32, &[4, 6][..], &[2, 3][..])
    );
    assert_eq!((array.key(&[1, 0]), array.key(&[])), ("1.0".to_owned(), "0".to_owned()));
    let array = Array::of_zarr3(ZARR3.as_bytes()).unwrap();
    assert_eq!((array.dtype, array.is_zstd), (TensorType::Bf16, true));
    assert_eq!(array.inner, Some(Inner { chunk: vec![2, 2], is_index_first: false, has_crc: true }));
    assert_eq!((array.key(&[1, 0]), array.key(&[])), ("c/1/0".to_owned(), "c".to_owned()));
    let plain = ZARR3.replace("\"default\"", "\"v2\",\"configuration\":{\"separator\":\"/\"}");
    assert_eq!(Array::of_zarr3(plain.as_bytes()).unwrap().key(&[1, 0]), "1/0");
}

#[test]
fn what_is_not_read_is_refused_by_name() {
    let refused = |text: &str, from: &str, to: &str, of: fn(&[u8]) -> Result<Array, Fault>| {
        assert!(text.contains(from), "{from}");
        of(text.replacen(from, to, 1).as_bytes()).unwrap_err().to_string()
    };
    for (from, to, expected) in [
        ("zstd", "blosc", "its compressor is `blosc`"),
        ("<f4", ">f4", "its dtype is `>f4`"),
        ("<f4", "int4", "its dtype is `int4`"),
        ("\"C\"", "\"F\"", "its order is `F`"),
        ("\"filters\":null", "\"filters\":[{\"id\":\"delta\"}]", "its filters is `[{\"id\":\"delta\"}]`"),
        ("\".\"", "\"_\"", "its separator of indexes is `_`"),
        ("[2,3]", "[2,0]", "do not fit each other"),
        ("[2,3]", "[2]", "do not fit each other"),
        ("[4,6]", "[4,9223372036854775807]", "do not fit each other"),
        ("\"shape\"", "\"more\":1,\"shape\"", "unknown field `more`"),
        (":2}", ":3}", "its zarr_format is `3`"),
    ] {
        let error = refused(ZARR2, from, to, Array::of_zarr2);
        assert!(error.contains(expected), "{error}");
    }
    for (from, to, expected) in [
        ("\"zstd\"", "\"gzip\"", "its list of codecs is `bytes, gzip`"),
        ("\"little\"", "\"big\"", "its order of bytes is `big`"),
        ("\"name\":\"bytes\"", "\"name\":\"transpose\"", "its first codec is `transpose`"),
        ("\"crc32c\"", "\"zstd\"", "its index codec is `zstd`"),
        ("\"regular\"", "\"rectangular\"", "its chunk_grid is `rectangular`"),
        ("\"default\"", "\"fan-out\"", "its chunk_key_encoding is `fan-out`"),
        ("\"bfloat16\"", "\"complex128\"", "its data_type is `complex128`"),
        ("\"array\"", "\"group\"", "its node_type is `group`"),
        ("[2,2]", "[2,3]", "do not fit each other"),
        (
            "\"index_codecs\"",
            "\"index_location\":\"middle\",\"index_codecs\"",
            "its index_location is `middle`",
        ),
        (
            "\"node_type\"",
            "\"storage_transformers\":[],\"node_type\"",
            "unknown field `storage_transformers`",
        ),
    ] {
        let error = refused(ZARR3, from, to, Array::of_zarr3);
        assert!(error.contains(expected), "{error}");
    }
}
