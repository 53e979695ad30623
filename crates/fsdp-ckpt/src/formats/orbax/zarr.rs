//! The metadata of zarr arrays, version 2 (`.zarray`) and 3 (`zarr.json`), as TensorStore writes them for Orbax.
//!
//! An array is cut into a grid of equal chunks; those at its ends reach beyond it and are padded. A chunk is stored
//! under a key with its index, in C order, as it is or as one zstd stream. In version 3 it may be cut once more
//! (`sharding_indexed`): then it is a list of such streams in any order, with an index at one end. Everything else of
//! zarr is refused by name.

use serde::Deserialize;
use serde_json::Value as Json;

use crate::{
    checkpoint::{element_count, len_bytes},
    error::Fault,
    safetensors::TensorType,
};

/// Maximum number of dimensions.
const DIMENSIONS_MAX: usize = 32;

/// An array.
#[derive(Debug, PartialEq)]
pub(super) struct Array {
    pub(super) dtype: TensorType,
    pub(super) shape: Vec<u64>,
    /// Size of a chunk in each dimension.
    pub(super) chunk: Vec<u64>,
    /// The chunks inside of each chunk, if it is cut once more.
    pub(super) inner: Option<Inner>,
    pub(super) is_zstd: bool,
    /// Whether a chunk that is not stored has zeros.
    pub(super) is_of_zeros: bool,
    keys: Keys,
}

/// How a chunk is cut once more.
#[derive(Debug, PartialEq)]
pub(super) struct Inner {
    pub(super) chunk: Vec<u64>,
    pub(super) is_index_first: bool,
    /// Whether a CRC-32C follows the index.
    pub(super) has_crc: bool,
}

/// The names of chunks.
#[derive(Debug, PartialEq)]
enum Keys {
    /// `c/0/1`, or `c` for an array of no dimensions.
    Prefixed(char),
    /// `0.1`, or `0` for an array of no dimensions.
    Plain(char),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Zarr2 {
    zarr_format: u64,
    shape: Vec<u64>,
    chunks: Vec<u64>,
    dtype: Json,
    compressor: Option<Named>,
    order: String,
    filters: Option<Json>,
    dimension_separator: Option<char>,
    #[serde(rename = "fill_value")]
    _fill_value: Json,
}

#[derive(Deserialize)]
struct Named {
    id: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Zarr3 {
    zarr_format: u64,
    node_type: String,
    shape: Vec<u64>,
    data_type: Json,
    chunk_grid: Part,
    chunk_key_encoding: Part,
    codecs: Vec<Part>,
    fill_value: Json,
    #[serde(default, rename = "attributes")]
    _attributes: Json,
    #[serde(default, rename = "dimension_names")]
    _dimension_names: Json,
}

/// A part of an array's description: a name and what it needs.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Part {
    name: String,
    #[serde(default)]
    configuration: Json,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Sharding {
    chunk_shape: Vec<u64>,
    codecs: Vec<Part>,
    index_codecs: Vec<Part>,
    index_location: Option<String>,
}

impl Array {
    /// Parses a `.zarray`.
    pub(super) fn of_zarr2(text: &[u8]) -> Result<Array, Fault> {
        let zarr: Zarr2 = parse(text)?;
        expect("zarr_format", &zarr.zarr_format.to_string(), &["2"])?;
        expect("order", &zarr.order, &["C"])?;
        if let Some(filters) = zarr.filters {
            return Err(unsupported("filters", &filters.to_string(), "null"));
        }
        if let Some(Named { id }) = &zarr.compressor {
            expect("compressor", id, &["zstd"])?;
        }
        let dtype = text_of(&zarr.dtype);
        let dtype = numpy_type(&dtype).ok_or_else(|| unsupported("dtype", &dtype, "one of a tensor"))?;
        let keys = Keys::Plain(separator(zarr.dimension_separator.unwrap_or('.'))?);
        let is_zstd = zarr.compressor.is_some();
        Array { dtype, shape: zarr.shape, chunk: zarr.chunks, inner: None, is_zstd, is_of_zeros: false, keys }
            .checked()
    }

    /// Parses a `zarr.json`.
    pub(super) fn of_zarr3(text: &[u8]) -> Result<Array, Fault> {
        let zarr: Zarr3 = parse(text)?;
        expect("zarr_format", &zarr.zarr_format.to_string(), &["3"])?;
        expect("node_type", &zarr.node_type, &["array"])?;
        expect("chunk_grid", &zarr.chunk_grid.name, &["regular"])?;
        let name = text_of(&zarr.data_type);
        let dtype = TensorType::all().find(|ty| ty.torch_name() == Some(&name[..]));
        let dtype = dtype.ok_or_else(|| unsupported("data_type", &name, "one of a tensor"))?;
        let fill = zarr.fill_value;
        let is_of_zeros = fill.as_f64().map(f64::to_bits) == Some(0) || fill == Json::Bool(false);
        let chunk = dims(&zarr.chunk_grid.configuration["chunk_shape"])?;
        let encoding = &zarr.chunk_key_encoding;
        expect("chunk_key_encoding", &encoding.name, &["default", "v2"])?;
        let given = encoding.configuration["separator"].as_str().and_then(|text| text.chars().next());
        let keys = match &encoding.name[..] {
            "v2" => Keys::Plain(separator(given.unwrap_or('.'))?),
            _ => Keys::Prefixed(separator(given.unwrap_or('/'))?),
        };
        let (inner, is_zstd) = match &zarr.codecs[..] {
            [sharding] if sharding.name == "sharding_indexed" => {
                let sharding: Sharding = serde_json::from_value(sharding.configuration.clone())
                    .map_err(|error| Fault::new(format!("its sharding_indexed cannot be read: {error}")))?;
                let location = sharding.index_location.unwrap_or_else(|| "end".to_owned());
                expect("index_location", &location, &["start", "end"])?;
                let has_crc = match &sharding.index_codecs[..] {
                    [bytes] => expect_bytes(bytes, 8).map(|()| false)?,
                    [bytes, crc] => {
                        expect("index codec", &crc.name, &["crc32c"])?;
                        expect_bytes(bytes, 8).map(|()| true)?
                    }
                    _ => {
                        return Err(unsupported(
                            "index_codecs",
                            &names(&sharding.index_codecs),
                            "bytes, crc32c",
                        ));
                    }
                };
                let chunk = sharding.chunk_shape;
                (
                    Some(Inner { chunk, is_index_first: location == "start", has_crc }),
                    is_zstd(&sharding.codecs, dtype)?,
                )
            }
            codecs => (None, is_zstd(codecs, dtype)?),
        };
        Array { dtype, shape: zarr.shape, chunk, inner, is_zstd, is_of_zeros, keys }.checked()
    }

    /// Checks that shape and chunks fit each other and can be counted.
    fn checked(self) -> Result<Array, Fault> {
        let Array { shape, chunk, inner, dtype, .. } = &self;
        let inner = inner.as_ref().map_or(chunk, |inner| &inner.chunk);
        let are_equal = chunk.len() == shape.len() && inner.len() == shape.len();
        let divides =
            inner.iter().zip(chunk).all(|(inner, chunk)| *inner > 0 && *chunk > 0 && chunk % inner == 0);
        let can_be_counted = [shape, chunk]
            .iter()
            .all(|dims| len_bytes(dims, dtype.size_bytes()).is_some() && dims.len() <= DIMENSIONS_MAX);
        match are_equal && divides && can_be_counted {
            true => Ok(self),
            false => {
                let reason =
                    format!("it has the shape {shape:?}, chunks {chunk:?} and inside of them {inner:?}");
                Err(Fault::new(format!("{reason}, which do not fit each other; save it again")))
            }
        }
    }

    /// The key of a chunk, below that of the array.
    pub(super) fn key(&self, index: &[u64]) -> String {
        let (prefix, separator) = match self.keys {
            Keys::Plain(_) if index.is_empty() => return "0".to_owned(),
            Keys::Plain(separator) => (None, separator),
            Keys::Prefixed(separator) => (Some("c".to_owned()), separator),
        };
        let steps: Vec<String> = prefix.into_iter().chain(index.iter().map(u64::to_string)).collect();
        steps.join(&separator.to_string())
    }

    /// Number of chunks in a chunk; `None` if it does not fit in 64 bits.
    pub(super) fn inner_count(&self, inner: &Inner) -> Option<u64> {
        let counts: Vec<u64> =
            self.chunk.iter().zip(&inner.chunk).map(|(outer, inner)| outer / inner).collect();
        element_count(&counts)
    }
}

fn parse<'a, T: Deserialize<'a>>(text: &'a [u8]) -> Result<T, Fault> {
    serde_json::from_slice(text).map_err(|error| Fault::new(format!("it cannot be read: {error}")))
}

fn unsupported(key: &str, got: &str, expected: &str) -> Fault {
    Fault::unsupported(format!("its {key} is `{got}`, which is not read; it should be {expected}"))
}

fn expect(key: &str, got: &str, expected: &[&str]) -> Result<(), Fault> {
    match expected.contains(&got) {
        true => Ok(()),
        false => Err(unsupported(key, got, &expected.join(" or "))),
    }
}

fn separator(found: char) -> Result<char, Fault> {
    expect("separator of indexes", &found.to_string(), &[".", "/"]).map(|()| found)
}

fn text_of(json: &Json) -> String {
    json.as_str().map_or_else(|| json.to_string(), str::to_owned)
}

fn dims(json: &Json) -> Result<Vec<u64>, Fault> {
    let dims = json.as_array().and_then(|dims| dims.iter().map(Json::as_u64).collect());
    dims.ok_or_else(|| Fault::new(format!("its chunk_shape is {json}, not a list of sizes; save it again")))
}

fn names(codecs: &[Part]) -> String {
    codecs.iter().map(|codec| &codec.name[..]).collect::<Vec<_>>().join(", ")
}

/// Whether codecs compress elements; anything but plain elements and zstd is refused.
fn is_zstd(codecs: &[Part], dtype: TensorType) -> Result<bool, Fault> {
    match codecs {
        [bytes] => expect_bytes(bytes, dtype.size_bytes()).map(|()| false),
        [bytes, zstd] if zstd.name == "zstd" => expect_bytes(bytes, dtype.size_bytes()).map(|()| true),
        _ => Err(unsupported("list of codecs", &names(codecs), "bytes, or bytes and zstd")),
    }
}

/// Checks that a codec stores elements of `size` bytes as they are.
fn expect_bytes(codec: &Part, size: usize) -> Result<(), Fault> {
    expect("first codec", &codec.name, &["bytes"])?;
    match &codec.configuration["endian"] {
        Json::Null if size == 1 => Ok(()),
        endian => expect("order of bytes", &text_of(endian), &["little"]),
    }
}

/// The type of this name in zarr 2: that of numpy, or of its extension by JAX.
fn numpy_type(name: &str) -> Option<TensorType> {
    let name = match name {
        "|b1" => "bool",
        "|i1" => "int8",
        "|u1" => "uint8",
        "<i2" => "int16",
        "<u2" => "uint16",
        "<i4" => "int32",
        "<u4" => "uint32",
        "<i8" => "int64",
        "<u8" => "uint64",
        "<f2" => "float16",
        "<f4" => "float32",
        "<f8" => "float64",
        "<c8" => "complex64",
        "bfloat16" | "float8_e4m3fn" | "float8_e5m2" | "float8_e4m3fnuz" | "float8_e5m2fnuz" => name,
        _ => return None,
    };
    TensorType::all().find(|ty| ty.torch_name() == Some(name))
}

#[cfg(test)]
mod tests;
