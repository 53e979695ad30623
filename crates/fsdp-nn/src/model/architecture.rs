//! The [`Architecture`] trait, which every model implements.

use std::fmt;
use std::sync::Arc;

use fsdp_core::Error;
use fsdp_core::model::BlockId;

use crate::graph::{Builder, Tensor};
use crate::layer::{Description, Head};

/// A language model: its description, and the forward computation of each block, written against a [`Builder`].
///
/// The first block maps tokens to rows, and the last one produces the input of the head. The head, the loss and
/// backward are derived. A block may read only the parameters that the description lists for it.
///
/// ```
/// use fsdp_core::{Error, model::BlockId};
/// use fsdp_nn::layer::{Describe, Description, Embedding, Head, Linear, RmsNorm};
/// use fsdp_nn::model::Architecture;
/// use fsdp_nn::op::Function;
/// use fsdp_nn::graph::{Builder, Tensor};
///
/// /// Tokens, one residual layer, and a head that shares the table of tokens.
/// #[derive(Clone)]
/// struct Residual {
///     description: Description,
///     tokens: Embedding,
///     norm: RmsNorm,
///     linear: Linear,
///     head: Head,
/// }
///
/// impl Residual {
///     fn new(vocab: usize, width: usize) -> Result<Self, Error> {
///         let mut describe = Describe::new("Residual", 0.02);
///         let tokens = describe.embedding("tokens", vocab, width);
///         let (norm, linear) = describe.module("layer", "ResidualLayer", |layer| {
///             (layer.rms_norm("norm", "RmsNorm", width, 1e-5), layer.linear("linear", width, width, true))
///         });
///         let head = describe.head("head", width, vocab, Some(&tokens));
///         describe.block("tokens", None, &[&tokens]);
///         describe.block("layer", Some(0), &[&norm, &linear]);
///         describe.block("head", None, &[&head]);
///         Ok(Self { description: describe.finish()?, tokens, norm, linear, head })
///     }
/// }
///
/// impl Architecture for Residual {
///     fn description(&self) -> &Description {
///         &self.description
///     }
///
///     fn head(&self) -> Head {
///         self.head
///     }
///
///     fn first(&self, b: &mut Builder<'_>) -> Result<Tensor, Error> {
///         b.embedding(&self.tokens)
///     }
///
///     fn middle(
///         &self,
///         _block: BlockId,
///         b: &mut Builder<'_>,
///         x: Tensor,
///     ) -> Result<Tensor, Error> {
///         let h = b.rms_norm(x, &self.norm)?;
///         let h = b.linear(h, &self.linear)?;
///         let h = b.activation(Function::GeluTanh, h);
///         b.add(x, h)
///     }
///
///     fn last(&self, _b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
///         Ok(x)
///     }
/// }
///
/// let model = Residual::new(256, 16)?;
/// assert_eq!(model.description().spec.elements(), 256 * 16 + 16 + 16 * 16 + 16);
/// # Ok::<(), Error>(())
/// ```
pub trait Architecture: Send + Sync + 'static {
    /// Returns the model's parameters with their initialization, modules and blocks.
    fn description(&self) -> &Description;

    /// Returns the output head; its weight belongs to the parameters of the last block.
    fn head(&self) -> Head;

    /// Returns the maximum sequence length, or `None` if there is no limit.
    fn positions_max(&self) -> Option<usize> {
        None
    }

    /// Builds the first block.
    ///
    /// # Errors
    /// Those of the operations.
    fn first(&self, b: &mut Builder<'_>) -> Result<Tensor, Error>;

    /// Builds a block that is neither first nor last.
    ///
    /// # Errors
    /// Those of the operations.
    fn middle(&self, block: BlockId, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error>;

    /// Builds the last block, up to the input of the head.
    ///
    /// # Errors
    /// Those of the operations.
    fn last(&self, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error>;
}

impl fmt::Debug for dyn Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.description().spec.modules[0].class)
    }
}

impl<A: Architecture + ?Sized> Architecture for Arc<A> {
    fn description(&self) -> &Description {
        (**self).description()
    }

    fn head(&self) -> Head {
        (**self).head()
    }

    fn positions_max(&self) -> Option<usize> {
        (**self).positions_max()
    }

    fn first(&self, b: &mut Builder<'_>) -> Result<Tensor, Error> {
        (**self).first(b)
    }

    fn middle(&self, block: BlockId, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        (**self).middle(block, b, x)
    }

    fn last(&self, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        (**self).last(b, x)
    }
}
