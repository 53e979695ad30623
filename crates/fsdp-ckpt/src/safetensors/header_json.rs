//! The JSON text of a header: parsed into raw entries, and written canonically.
//!
//! Parsing goes entry by entry, so the memory for a hostile header is proportional to its tensors, and every fault
//! names its tensor. serde's error type carries only text, so the visitors store the typed fault in a shared slot.

use std::{collections::BTreeMap, fmt};

use serde::{
    Deserialize, Serialize, Serializer,
    de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor},
    ser::SerializeMap,
};

use super::{Metadata, TensorEntry, TensorType};
use crate::{error::Fault, unique_map::UniqueMap};

/// The key of the metadata, among the tensor names.
pub(super) const METADATA_KEY: &str = "__metadata__";

/// Maximum number of dimensions of a tensor; NumPy and PyTorch allow 64.
const DIMENSIONS_MAX: usize = 64;

/// The contents of a header before it is compared with the file.
#[derive(Default)]
pub(super) struct RawHeader {
    pub(super) tensors: Vec<RawEntry>,
    pub(super) metadata: Option<Metadata>,
}

pub(super) struct RawEntry {
    pub(super) name: String,
    pub(super) dtype: TensorType,
    pub(super) shape: Vec<usize>,
    pub(super) offsets: [u64; 2],
}

/// Parses the text of a header.
pub(super) fn read(text: &str) -> Result<RawHeader, Fault> {
    let mut fault = None;
    let mut json = serde_json::Deserializer::from_str(text);
    let raw = json.deserialize_map(HeaderVisitor { fault: &mut fault });
    match raw.and_then(|raw| json.end().map(|()| raw)) {
        Ok(raw) => Ok(raw),
        Err(error) => {
            Err(fault.unwrap_or_else(|| Fault::new(format!("its header is not valid JSON: {error}"))))
        }
    }
}

/// The canonical text of a header: metadata, then the tensors in the given order, without spaces.
pub(super) fn write(tensors: &[TensorEntry], metadata: Option<&Metadata>) -> Vec<u8> {
    serde_json::to_vec(&HeaderText { tensors, metadata }).expect("strings and integers always serialize")
}

/// The fault for two entries with the same name (`__metadata__` for the metadata).
pub(super) fn twice(name: &str) -> Fault {
    Fault::new(format!("its header lists `{name}` twice"))
}

/// The fault for a tensor of a type smaller than a byte whose rows end within a byte or a group of bytes.
pub(super) fn parted_rows(name: &str, dtype: TensorType, shape: &[usize]) -> Fault {
    let values = dtype.values();
    Fault::unsupported(format!(
        "tensor `{name}` ({dtype} {shape:?}) is packed {values} values at a time; only shapes whose last dimension is a \
         multiple of {values} are supported"
    ))
}

/// Stores the typed fault and returns an error that stops serde.
fn refuse<E: serde::de::Error>(slot: &mut Option<Fault>, fault: Fault) -> E {
    slot.get_or_insert(fault);
    E::custom("refused")
}

struct HeaderVisitor<'a> {
    fault: &'a mut Option<Fault>,
}

impl<'de> Visitor<'de> for HeaderVisitor<'_> {
    type Value = RawHeader;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
        let mut raw = RawHeader::default();
        let mut names = BTreeMap::new();
        while let Some(name) = map.next_key::<String>()? {
            if names.insert(name.clone(), ()).is_some() {
                return Err(refuse(self.fault, twice(&name)));
            }
            if name == METADATA_KEY {
                let pairs = map.next_value::<Option<UniqueMap<String>>>().map_err(|error| {
                    let rule = "its `__metadata__` is not a map of strings to strings without repeated keys";
                    refuse::<A::Error>(self.fault, Fault::new(format!("{rule}: {error}")))
                })?;
                raw.metadata = pairs.map(|pairs| pairs.0.into_iter().collect());
            } else {
                let fields = map.next_value::<Fields>().map_err(|error| {
                    let fault = Fault::new(format!("the entry of tensor `{name}` cannot be read: {error}"));
                    refuse::<A::Error>(self.fault, fault)
                })?;
                let entry = fields.read(name).map_err(|fault| refuse::<A::Error>(self.fault, fault))?;
                raw.tensors.push(entry);
            }
        }
        Ok(raw)
    }
}

/// The fields of an entry. Others are ignored, as by the reference implementation.
#[derive(Deserialize)]
struct Fields {
    dtype: String,
    shape: Dimensions,
    data_offsets: [u64; 2],
}

impl Fields {
    fn read(self, name: String) -> Result<RawEntry, Fault> {
        let Fields { dtype, shape: Dimensions(mut shape), data_offsets: offsets } = self;
        let Some(dtype) = TensorType::from_name(&dtype) else {
            let supported = TensorType::list();
            return Err(Fault::new(format!(
                "tensor `{name}` has dtype `{dtype}`; supported are {supported}"
            )));
        };
        if dtype.values() > 1 {
            let last = shape.last_mut().filter(|last| last.is_multiple_of(dtype.values()));
            match last {
                Some(last) => *last /= dtype.values(),
                None => return Err(parted_rows(&name, dtype, &shape)),
            }
        }
        Ok(RawEntry { name, dtype, shape, offsets })
    }
}

struct Dimensions(Vec<usize>);

impl<'de> Deserialize<'de> for Dimensions {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(DimensionsVisitor)
    }
}

struct DimensionsVisitor;

impl<'de> Visitor<'de> for DimensionsVisitor {
    type Value = Dimensions;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of dimensions")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Dimensions, A::Error> {
        let mut dimensions = Vec::new();
        while let Some(dimension) = seq.next_element()? {
            if dimensions.len() == DIMENSIONS_MAX {
                return Err(A::Error::custom(format_args!("more than {DIMENSIONS_MAX} dimensions")));
            }
            dimensions.push(dimension);
        }
        Ok(Dimensions(dimensions))
    }
}

struct HeaderText<'a> {
    tensors: &'a [TensorEntry],
    metadata: Option<&'a Metadata>,
}

#[derive(Serialize)]
struct EntryText {
    dtype: &'static str,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl Serialize for HeaderText<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        if let Some(metadata) = self.metadata {
            map.serialize_entry(METADATA_KEY, metadata)?;
        }
        for tensor in self.tensors {
            let range = tensor.data_range();
            let data_offsets = [range.start, range.end];
            let shape: Vec<u64> = tensor.shape().iter().map(|&size| size as u64).collect();
            let dtype = tensor.dtype();
            let text = EntryText { dtype: dtype.name(), shape: dtype.value_shape(&shape), data_offsets };
            map.serialize_entry(tensor.name(), &text)?;
        }
        map.end()
    }
}
