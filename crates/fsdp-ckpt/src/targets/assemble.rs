//! Executes an output plan in memory, slowly and with every rule checked.

use std::collections::BTreeMap;

use crate::{
    checkpoint::{Key, Object, Role, Value, join},
    safetensors::TensorType,
    targets::{OutputTensor, Selection},
    transfer::OutputPlan,
};

/// Returns the files of a plan by name, given all bytes of each source tensor.
pub(crate) fn assemble(plan: OutputPlan, data: &BTreeMap<String, Vec<u8>>) -> BTreeMap<String, Vec<u8>> {
    let mut files: Vec<Written> = plan.files.iter().map(|file| Written::new(file.len as usize)).collect();
    let mut digests = Vec::new();
    for (file, out) in plan.files.iter().zip(&mut files) {
        file.literals.iter().for_each(|(at, bytes)| out.put(*at, bytes));
        let mut of_file = Vec::new();
        for place in &file.places {
            let size = place.dtype.size_bytes();
            let bytes = &data[&place.tensor]
                [place.elements.start as usize * size..place.elements.end as usize * size];
            out.put(place.offset, bytes);
            of_file.push(place.digest.map(|kind| kind.of(bytes)));
        }
        digests.push(of_file);
    }
    let tail = (plan.tail)(&digests).unwrap();
    tail.patches.iter().for_each(|(file, at, bytes)| files[*file].put(*at, bytes));
    let names = plan.files.into_iter().map(|file| file.name);
    names.zip(files.into_iter().map(|file| file.bytes)).chain(tail.files).collect()
}

struct Written {
    bytes: Vec<u8>,
    is_written: Vec<bool>,
}

impl Written {
    fn new(len: usize) -> Written {
        Written { bytes: vec![0; len], is_written: vec![false; len] }
    }

    fn put(&mut self, at: u64, bytes: &[u8]) {
        let range = at as usize..at as usize + bytes.len();
        assert!(self.is_written[range.clone()].iter().all(|written| !written), "bytes are planned once");
        self.bytes[range.clone()].copy_from_slice(bytes);
        self.is_written[range].fill(true);
    }
}

/// Parses a path of steps separated by dots; numeric steps become indices.
pub(crate) fn path(text: &str) -> Vec<Key> {
    let key = |step: &str| match step.parse() {
        Ok(index) => Key::Index(index),
        Err(_) => Key::Name(step.to_owned()),
    };
    text.split('.').map(key).collect()
}

/// An output tensor that keeps its name and dtype.
pub(crate) fn tensor(name: &str, dtype: TensorType, shape: &[u64]) -> OutputTensor {
    let path = path(name);
    let (name, source) = (join(&path), name.to_owned());
    OutputTensor { name, path, role: Role::Model, source, dtype, shape: shape.to_vec(), tied_to: None }
}

/// A value with this name.
pub(crate) fn object(name: &str, value: Value) -> Object {
    Object { path: path(name), role: Role::Other, value }
}

/// Generates recognizable bytes for every tensor of a selection.
pub(crate) fn data_of(selection: &Selection) -> BTreeMap<String, Vec<u8>> {
    let bytes = |tensor: &OutputTensor| {
        let salt = tensor.source.len() as u64 * 31;
        // Small bytes, so that every element is a valid boolean.
        let modulus = if tensor.dtype == TensorType::Bool { 2 } else { 251 };
        (0..tensor.len_bytes()).map(|at| ((at + salt) % modulus) as u8).collect()
    };
    selection.tensors.iter().map(|tensor| (tensor.source.clone(), bytes(tensor))).collect()
}
