//! A small model for tests: every token separately passes through linear maps and GELU, to a head.
//!
//! Its sizes are free (odd, prime, one). It covers everything that can be tested without attention.

use fsdp_core::Error;
use fsdp_core::model::BlockId;

use super::architecture::Architecture;
use crate::graph::{Builder, Tensor};
use crate::layer::{Describe, Description, Embedding, Head, Linear};
use crate::op::Function;

/// The sizes of an [`Mlp`].
#[derive(Clone, Debug, PartialEq)]
pub struct MlpConfig {
    /// Vocabulary size.
    pub vocab: usize,
    /// Widths of the embedding and of each layer's output; one more than the number of layers.
    pub widths: Vec<usize>,
    /// Whether linear maps have biases.
    pub bias: bool,
    /// Whether the head shares the embedding table; requires equal first and last widths.
    pub tied: bool,
    /// Standard deviation of initial weights.
    pub std: f64,
}

/// An embedding, linear maps each followed by GELU, and a head. Every layer is a block (and a layer).
#[derive(Clone, Debug)]
pub struct Mlp {
    description: Description,
    embedding: Embedding,
    layers: Vec<Linear>,
    head: Head,
}

impl Mlp {
    /// Describes an MLP.
    ///
    /// # Errors
    /// [`Error::Model`] if a size is zero, or the model is tied and its first and last widths differ.
    pub fn new(config: &MlpConfig) -> Result<Self, Error> {
        let (Some(&first), Some(&last)) = (config.widths.first(), config.widths.last()) else {
            return Err(Error::Model { what: "an MLP needs at least one width".into() });
        };
        if config.tied && first != last {
            let what = format!("a tied MLP needs equal first and last widths, not {first} and {last}");
            return Err(Error::Model { what });
        }
        let mut describe = Describe::new("Mlp", config.std);
        let embedding = describe.embedding("embed", config.vocab, first);
        let layers = describe.module("layers", "ModuleList", |d| {
            let layer = |(i, widths): (usize, &[usize])| {
                d.module(&i.to_string(), "MlpLayer", |d| {
                    d.linear("linear", widths[0], widths[1], config.bias)
                })
            };
            config.widths.windows(2).enumerate().map(layer).collect::<Vec<_>>()
        });
        let head = describe.head("head", last, config.vocab, config.tied.then_some(&embedding));
        describe.block("embedding", None, &[&embedding]);
        for (i, layer) in layers.iter().enumerate() {
            describe.block(&format!("layers.{i}"), Some(i), &[layer]);
        }
        describe.block("head", None, &[&head]);
        Ok(Self { description: describe.finish()?, embedding, layers, head })
    }
}

impl Architecture for Mlp {
    fn description(&self) -> &Description {
        &self.description
    }

    fn head(&self) -> Head {
        self.head
    }

    fn first(&self, b: &mut Builder<'_>) -> Result<Tensor, Error> {
        b.embedding(&self.embedding)
    }

    fn middle(&self, block: BlockId, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        let y = b.linear(x, &self.layers[block.0 - 1])?;
        Ok(b.activation(Function::GeluTanh, y))
    }

    fn last(&self, _b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        Ok(x)
    }
}
