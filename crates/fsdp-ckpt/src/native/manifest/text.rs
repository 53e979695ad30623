//! The text format of a manifest: types that mirror the JSON.
//!
//! ```text
//! {"format":"fsdp native checkpoint","version":1,"world_size":2,
//!  "tensors":{"w":{"dtype":"F32","shape":[8,4],"role":"model"}, ..},
//!  "files":[{"name":"shard-00001-..","len":640,"data_start":512,"header":"0123456789abcdef",
//!            "shards":{"w":{"rows":[0,4],"chunk_rows":4,"chunks":["0123456789abcdef"]}, ..}}, ..],
//!  "values":{}, "run_state":{..}, "digest":"crc64:0123456789abcdef"}
//! ```
//!
//! Unknown fields and repeated keys are errors, because they might change the meaning of the rest. A `path` that
//! consists of the name only is omitted.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use super::{Manifest, ManifestFile, ManifestShard, ManifestTensor};
use crate::{
    checkpoint::{Key, Object, Role},
    digest::{Digest, DigestKind},
    error::Fault,
    native::{seal::parse_digits, values},
    safetensors::{TensorSpec, TensorType},
    unique_map::UniqueMap,
};

const FORMAT: &str = "fsdp native checkpoint";
const VERSION: u64 = 1;

/// The two fields that determine how to read the rest.
#[derive(Deserialize)]
struct Kind {
    format: String,
    version: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ManifestText {
    format: String,
    version: u64,
    world_size: usize,
    tensors: UniqueMap<TensorText>,
    files: Vec<FileText>,
    values: UniqueMap<ObjectText>,
    run_state: serde_json::Map<String, serde_json::Value>,
}

/// A tensor in the text of a manifest.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::native) struct TensorText {
    dtype: String,
    shape: Vec<usize>,
    #[serde(with = "RoleText")]
    role: Role,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    path: Option<Vec<KeyText>>,
}

/// The text of a role.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Role", rename_all = "lowercase")]
enum RoleText {
    Model,
    Optimizer,
    Other,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum KeyText {
    Index(u64),
    Name(String),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileText {
    name: String,
    len: u64,
    data_start: u64,
    header: Hex,
    shards: UniqueMap<ShardText>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ShardText {
    rows: [usize; 2],
    chunk_rows: usize,
    chunks: Vec<Hex>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ObjectText {
    path: Vec<KeyText>,
    #[serde(with = "RoleText")]
    role: Role,
    value: serde_json::Value,
}

/// A 64-bit number as sixteen hexadecimal digits.
struct Hex(u64);

/// Reads the text, whose digest has been verified.
pub(super) fn read(text: &[u8]) -> Result<Manifest, Fault> {
    let malformed = |error: serde_json::Error| Fault::new(format!("its text cannot be read: {error}"));
    let kind: Kind = serde_json::from_slice(text).map_err(malformed)?;
    if kind.format != FORMAT {
        return Err(Fault::new(format!("its format is `{}`, not `{FORMAT}`", kind.format)));
    }
    if kind.version != VERSION {
        let got = kind.version;
        return Err(Fault::unsupported(format!(
            "it has format version {got}, but this program reads version {VERSION}; use a newer fsdp"
        )));
    }
    let text: ManifestText = serde_json::from_slice(text).map_err(malformed)?;
    let tensors = text.tensors.0.into_iter().map(|(name, tensor)| {
        let tensor = tensor.read(&name)?;
        Ok((name, tensor))
    });
    let values = text.values.0.into_iter().map(|(name, object)| {
        let object = object.read(&name)?;
        Ok((name, object))
    });
    Ok(Manifest {
        world_size: text.world_size,
        tensors: tensors.collect::<Result<_, Fault>>()?,
        files: text.files.into_iter().map(FileText::read).collect(),
        values: values.collect::<Result<_, Fault>>()?,
        run_state: text.run_state,
    })
}

/// Creates the text of a manifest, to be sealed.
pub(super) fn write(manifest: &Manifest) -> Result<ManifestText, Fault> {
    let tensor = |(name, tensor): (&String, &ManifestTensor)| {
        let spec = TensorSpec { name: name.clone(), dtype: tensor.dtype, shape: tensor.shape.clone() };
        (name.clone(), tensor_text(&spec, &tensor.path, tensor.role))
    };
    let value = |(name, object): (&String, &Object)| {
        let too_deep = || {
            Fault::unsupported(format!("value `{name}` is nested too deeply for a manifest; leave it out"))
        };
        let value = values::to_json(&object.value).ok_or_else(too_deep)?;
        let path = object.path.iter().map(KeyText::of).collect();
        Ok((name.clone(), ObjectText { path, role: object.role, value }))
    };
    Ok(ManifestText {
        format: FORMAT.to_owned(),
        version: VERSION,
        world_size: manifest.world_size,
        tensors: UniqueMap(manifest.tensors.iter().map(tensor).collect()),
        files: manifest.files.iter().map(FileText::of).collect(),
        values: UniqueMap(manifest.values.iter().map(value).collect::<Result<_, Fault>>()?),
        run_state: manifest.run_state.clone(),
    })
}

/// Creates the text of a tensor in a manifest.
pub(in crate::native) fn tensor_text(spec: &TensorSpec, path: &[Key], role: Role) -> TensorText {
    let is_name = matches!(path, [Key::Name(name)] if *name == spec.name);
    TensorText {
        dtype: spec.dtype.name().to_owned(),
        shape: spec.shape.clone(),
        role,
        path: (!is_name).then(|| path.iter().map(KeyText::of).collect()),
    }
}

impl TensorText {
    fn read(self, name: &str) -> Result<ManifestTensor, Fault> {
        let Some(dtype) = TensorType::from_name(&self.dtype) else {
            return Err(Fault::new(format!("tensor `{name}` has the unknown dtype `{}`", self.dtype)));
        };
        let path = match self.path {
            Some(path) => path.into_iter().map(KeyText::read).collect(),
            None => vec![Key::Name(name.to_owned())],
        };
        Ok(ManifestTensor { dtype, shape: self.shape, path, role: self.role })
    }
}

impl FileText {
    fn of(file: &ManifestFile) -> FileText {
        let shard = |shard: &ManifestShard| {
            let rows = [shard.rows.start, shard.rows.end];
            let chunks = shard.chunks.iter().map(|&value| Hex(value)).collect();
            (shard.tensor.clone(), ShardText { rows, chunk_rows: shard.chunk_rows, chunks })
        };
        FileText {
            name: file.name.clone(),
            len: file.len,
            data_start: file.data_start,
            header: Hex(file.header.value),
            shards: UniqueMap(file.shards.iter().map(shard).collect()),
        }
    }

    fn read(self) -> ManifestFile {
        let shard = |(tensor, shard): (String, ShardText)| ManifestShard {
            tensor,
            rows: shard.rows[0]..shard.rows[1],
            chunk_rows: shard.chunk_rows,
            chunks: shard.chunks.into_iter().map(|Hex(value)| value).collect(),
        };
        ManifestFile {
            name: self.name,
            len: self.len,
            data_start: self.data_start,
            header: Digest { kind: DigestKind::Crc64, value: self.header.0 },
            shards: self.shards.0.into_iter().map(shard).collect(),
        }
    }
}

impl ObjectText {
    fn read(self, name: &str) -> Result<Object, Fault> {
        let value = values::from_json(self.value);
        let value =
            value.ok_or_else(|| Fault::new(format!("value `{name}` cannot be stored in a manifest")))?;
        Ok(Object { path: self.path.into_iter().map(KeyText::read).collect(), role: self.role, value })
    }
}

impl KeyText {
    fn of(key: &Key) -> KeyText {
        match key {
            Key::Name(name) => KeyText::Name(name.clone()),
            Key::Index(index) => KeyText::Index(*index),
        }
    }

    fn read(self) -> Key {
        match self {
            KeyText::Name(name) => Key::Name(name),
            KeyText::Index(index) => Key::Index(index),
        }
    }
}

impl Serialize for Hex {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:016x}", self.0))
    }
}

impl<'de> Deserialize<'de> for Hex {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Hex, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        let value = parse_digits(text.as_bytes()).map(Hex);
        value.ok_or_else(|| D::Error::custom("expected 16 lower-case hexadecimal digits"))
    }
}
