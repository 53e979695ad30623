//! The output head: the linear map to logits, and cross-entropy.

use super::describe::{Description, Role};

/// A target that does not count in the loss.
pub const IGNORED_TARGET: u32 = u32::MAX;

/// Terms that training adds to the cross-entropy of a row, and the loss scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossTerms {
    /// Share of the target that is spread evenly over all classes (Szegedy et al. 2016), as `label_smoothing` of
    /// `torch.nn.functional.cross_entropy`: at least 0 and below 1.
    pub label_smoothing: f64,
    /// Coefficient of the squared log-sum-exp of the logits (z-loss: PaLM, Chowdhery et al. 2022, section 5): at
    /// least 0.
    pub z_loss: f64,
    /// Coefficient of the routers' [balancing loss](super::RouterTerms): at least 0. The operations of the head ignore
    /// it.
    pub router_loss: f64,
    /// Coefficient of the routers' [z-loss](super::RouterTerms): at least 0. The operations of the head ignore it.
    pub router_z_loss: f64,
    /// Coefficient of the routers' sequence-wise [balance loss](super::RouterTerms): at least 0. The operations of the head
    /// ignore it.
    pub router_sequence_loss: f64,
    /// Factor of the gradients of all losses: a power of two, 1 unless gradients would underflow in f16. Loss values
    /// are not scaled.
    pub loss_scale: f64,
}

impl Default for LossTerms {
    fn default() -> Self {
        Self {
            label_smoothing: 0.0,
            z_loss: 0.0,
            router_loss: 0.0,
            router_z_loss: 0.0,
            router_sequence_loss: 0.0,
            loss_scale: 1.0,
        }
    }
}

impl LossTerms {
    /// Whether routers add to the loss.
    pub fn has_routers(&self) -> bool {
        [self.router_loss, self.router_z_loss, self.router_sequence_loss].iter().any(|&it| it != 0.0)
    }

    /// The z-losses of rows, if there is a z-loss.
    fn z_losses(&self, rows: usize) -> Option<Role> {
        (self.z_loss > 0.0).then(|| Role::double("z_losses", rows))
    }
}

/// Sizes of a linear map to logits followed by cross-entropy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadDims {
    /// Number of rows (tokens).
    pub rows: usize,
    /// Elements per hidden state.
    pub hidden: usize,
    /// Number of classes.
    pub vocab: usize,
    /// Rows whose logits are in memory at once (at least 1); depends only on the shape and on
    /// [`Backend::head_chunks`](crate::Backend::head_chunks).
    pub chunk_rows: usize,
    /// Soft cap: logits `x` become `cap * tanh(x / cap)` (Gemma 2). `None` for no cap.
    pub softcap: Option<f64>,
    /// Terms added to the loss.
    pub terms: LossTerms,
}

impl HeadDims {
    /// Sizes without a cap or loss terms.
    pub fn new([rows, hidden, vocab]: [usize; 3], chunk_rows: usize) -> Self {
        Self { rows, hidden, vocab, chunk_rows, softcap: None, terms: LossTerms::default() }
    }

    /// Returns the sizes of the logits of `rows` of the rows.
    pub fn logits(&self, rows: usize) -> LogitsDims {
        LogitsDims { rows, vocab: self.vocab, softcap: self.softcap, terms: self.terms }
    }

    /// Number of logits in a chunk.
    pub fn chunk_len(&self) -> usize {
        self.chunk_rows.clamp(1, self.rows.max(1)) * self.vocab
    }
}

/// Sizes of logits whose cross-entropy is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitsDims {
    /// Number of rows (tokens).
    pub rows: usize,
    /// Number of classes.
    pub vocab: usize,
    /// As [`HeadDims::softcap`].
    pub softcap: Option<f64>,
    /// As [`HeadDims::terms`].
    pub terms: LossTerms,
}

impl LogitsDims {
    /// Sizes without a cap or loss terms.
    pub fn new(rows: usize, vocab: usize) -> Self {
        Self { rows, vocab, softcap: None, terms: LossTerms::default() }
    }

    /// Operations outside of products: `each` per logit, plus `capping` per logit if there is a cap (divide, tanh and
    /// multiply; three more for its derivative), plus one per pass if labels are smoothed (for the mean or the
    /// derivative). A z-loss takes only a few operations per row.
    fn flops(&self, each: usize, capping: usize, passes: usize) -> usize {
        let capping = if self.softcap.is_some() { capping } else { 0 };
        let smoothing = if self.terms.label_smoothing > 0.0 { passes } else { 0 };
        (each + capping + smoothing) * self.rows * self.vocab
    }
}

/// Operations of the head. They are not part of a block's graph: the plan of the last block adds them.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "sizes are what they are called")]
pub enum Head {
    /// Cross-entropy of `logits = x W^T` (`weight` is `vocab x hidden`) against `targets`, with the terms of `dims`;
    /// a loss is 0 where the target is [`IGNORED_TARGET`]. With a z-loss, the last output is the z-loss part of each
    /// loss.
    Loss { dims: HeadDims },
    /// [`Head::Loss`] with the gradients of the **sum** of losses, to the weight too if `weight`. The gradient of the
    /// logits may be rounded to the tensors' dtype before the products, because devices multiply operands of one
    /// dtype; `is_rounded` gives it a buffer of its own.
    LossBackward { dims: HeadDims, weight: bool, is_rounded: bool },
    /// `logits = x W^T` for all rows, capped if there is a cap.
    Logits { dims: HeadDims },
    /// The losses of rows of logits of any float dtype. On devices that do not check targets on the host, a target
    /// outside the classes makes its loss NaN.
    CrossEntropy { dims: LogitsDims },
    /// [`Head::CrossEntropy`] with the gradient of the sum of losses, which replaces the logits or, if `is_rounded`,
    /// is rounded to `dlogits`.
    CrossEntropyBackward { dims: LogitsDims, is_rounded: bool },
}

impl Head {
    pub(super) fn describe(&self) -> Description {
        match *self {
            Head::Loss { dims } => of_head("head_loss", dims, 1)
                .read([Role::ids("targets", dims.rows)])
                .write([Role::losses(dims.rows), chunk(Role::statistic("logits", dims.chunk_len()), dims)])
                .write(dims.terms.z_losses(dims.rows))
                .flops(dims.logits(dims.rows).flops(4, 3, 1)),
            Head::LossBackward { dims, weight, is_rounded } => {
                let dlogits = chunk(Role::value("dlogits", dims.chunk_len()), dims);
                of_head("head_loss_backward", dims, 2 + u64::from(weight))
                    .read([Role::ids("targets", dims.rows)])
                    .write([
                        Role::losses(dims.rows),
                        chunk(Role::statistic("logits", dims.chunk_len()), dims),
                        Role::value("dx", dims.rows * dims.hidden),
                    ])
                    .write(weight.then(|| Role::gradient("dweight", dims.vocab * dims.hidden).adds()))
                    .write(is_rounded.then_some(dlogits))
                    .write(dims.terms.z_losses(dims.rows))
                    .flops(dims.logits(dims.rows).flops(6, 6, 2))
            }
            Head::Logits { dims } => {
                let len = dims.rows * dims.vocab;
                of_head("head_logits", dims, 1)
                    .write([Role::statistic("logits", len).or_more(len)])
                    .flops(dims.logits(dims.rows).flops(0, 3, 0))
            }
            Head::CrossEntropy { dims } => Description::new("cross_entropy")
                .read([Role::gradient("logits", dims.rows * dims.vocab), Role::ids("targets", dims.rows)])
                .write([Role::losses(dims.rows)])
                .write(dims.terms.z_losses(dims.rows))
                .constant(dims.softcap.unwrap_or(0.0))
                .constant(dims.terms.label_smoothing)
                .constant(dims.terms.z_loss)
                .constant(dims.terms.loss_scale)
                .flops(dims.flops(4, 3, 1)),
            Head::CrossEntropyBackward { dims, is_rounded } => {
                let (rows, len) = (dims.rows, dims.rows * dims.vocab);
                let logits = if is_rounded { Role::statistic } else { Role::gradient };
                Description::new("cross_entropy_backward")
                    .read([Role::ids("targets", rows)])
                    .write([logits("logits", len).updated(), Role::losses(rows)])
                    .write(is_rounded.then(|| Role::value("dlogits", len)))
                    .write(dims.terms.z_losses(rows))
                    .constant(dims.softcap.unwrap_or(0.0))
                    .constant(dims.terms.label_smoothing)
                    .constant(dims.terms.z_loss)
                    .constant(dims.terms.loss_scale)
                    .flops(dims.flops(6, 6, 2))
            }
        }
    }
}

/// The common part of all operations that map to logits.
fn of_head(name: &'static str, dims: HeadDims, products: u64) -> Description {
    let HeadDims { rows, hidden, vocab, .. } = dims;
    Description::new(name)
        .read([Role::value("x", rows * hidden), Role::value("weight", vocab * hidden)])
        .products(products, [rows, vocab, hidden])
}

/// Scratch for one chunk of logits, reused for all rows.
fn chunk(role: Role, dims: HeadDims) -> Role {
    role.scratch().or_more(dims.rows * dims.vocab)
}

#[cfg(test)]
mod tests {
    use fsdp_core::DType;

    use super::*;
    use crate::op::Op;

    #[test]
    fn label_smoothing_adds_flops_per_logit_and_z_loss_none() {
        let plain = HeadDims::new([5, 3, 7], 2);
        let terms = |label_smoothing, z_loss| HeadDims {
            terms: LossTerms { label_smoothing, z_loss, ..LossTerms::default() },
            ..plain
        };
        let cost = |op| Op::Head(op).cost(DType::Bf16, DType::F32).other_flops;
        let backward = |dims| cost(Head::LossBackward { dims, weight: true, is_rounded: false });
        let forward = |dims| cost(Head::Loss { dims });
        assert_eq!(backward(terms(0.1, 1e-4)) - backward(plain), 2 * 5 * 7);
        assert_eq!(forward(terms(0.1, 1e-4)) - forward(plain), 5 * 7);
        assert_eq!(backward(terms(0.0, 1e-4)), backward(plain));
    }

    #[test]
    fn softcap_adds_flops_per_logit_and_no_bytes() {
        let plain = HeadDims::new([5, 3, 7], 2);
        let capped = HeadDims { softcap: Some(30.0), ..plain };
        let cost = |op| Op::Head(op).cost(DType::Bf16, DType::F32);
        let logits = 5 * 7;
        for (op, more) in [
            (&(|dims: HeadDims| Head::Loss { dims }) as &dyn Fn(HeadDims) -> Head, 3),
            (&|dims| Head::LossBackward { dims, weight: true, is_rounded: false }, 6),
            (&|dims| Head::Logits { dims }, 3),
            (&|dims| Head::CrossEntropy { dims: dims.logits(5) }, 3),
            (&|dims| Head::CrossEntropyBackward { dims: dims.logits(5), is_rounded: true }, 6),
        ] {
            let (without, with) = (cost(op(plain)), cost(op(capped)));
            assert_eq!(with.other_flops, without.other_flops + more * logits);
            assert_eq!((with.bytes(), with.product_flops), (without.bytes(), without.product_flops));
        }
    }
}
