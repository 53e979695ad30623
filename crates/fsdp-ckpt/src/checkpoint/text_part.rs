//! The text part of a model of text and images.

use super::{Checkpoint, Key, Tensor, join};

/// The module of the text part in files of the whole model (Qwen 3.5), and what the text model calls it.
const TEXT: [&str; 2] = ["model.language_model.", "model."];

/// The module of images.
const IMAGES: &str = "model.visual.";

/// Whether a tensor belongs to the text part of a model of text and images.
pub(crate) fn is_of_text_part(name: &str) -> bool {
    name.starts_with(TEXT[0])
}

impl Checkpoint {
    /// A model of text and images as the text model that it contains: without tensors for images, and under the names of the
    /// text model.
    pub(crate) fn text_part(mut self) -> Checkpoint {
        let tensors = std::mem::take(&mut self.tensors).into_values();
        let of_text = tensors.filter(|tensor| !join(&tensor.path).starts_with(IMAGES));
        let renamed = of_text.map(|tensor| {
            let name = join(&tensor.path);
            match name.strip_prefix(TEXT[0]) {
                Some(rest) => Tensor { path: vec![Key::Name(format!("{}{rest}", TEXT[1]))], ..tensor },
                None => tensor,
            }
        });
        self.tensors = renamed.map(|tensor| (join(&tensor.path), tensor)).collect();
        self
    }
}
