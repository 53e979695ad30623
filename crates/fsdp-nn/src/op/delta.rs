//! Linear attention by the gated delta rule (Yang et al., 2024), and the short convolution before it.
//!
//! A value head has a state, a matrix `S` of key elements by value elements, zero before each document. Every token scales
//! it by `exp(g)`, corrects what the state returns for its key by a fraction `beta` of the difference from its value, and
//! reads the state with its query:
//!
//! ```text
//! S = exp(g) S;  S = S + k (beta (v - k^T S))^T;  y = S^T q
//! ```
//!
//! Queries and keys are divided by their norms, queries also by the root of their number of elements; `beta` is the logistic
//! function of a value of the token, and `g = -exp(a_log) softplus(a + dt_bias)`. Tokens are processed in chunks of [`CHUNK`],
//! counted from the first token of their document, so that neither other documents nor other samples change a bit. Backward
//! computes the states before all chunks again, in scratch, instead of keeping them.

use fsdp_core::Error;
use fsdp_core::memory::Category;

use super::describe::{Description, Role};
use super::linear::column_sums;
use crate::error::ModelError;
use crate::graph::{Backward, Builder, Call, Decl, Node, Operand, Tensor};
use crate::layer::{Convolution, DeltaGates, Layer};
use crate::op::Op;

/// Tokens that are processed together, as in transformers.
pub const CHUNK: usize = 64;

/// Added to the sum of squares of a query or key head before its root, as in transformers.
pub const NORM_EPS: f64 = 1e-6;

/// Sizes of a short convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConvolutionDims {
    /// Number of samples.
    pub batch: usize,
    /// Positions per sample.
    pub seq: usize,
    /// Elements per row, each of which is convolved by itself.
    pub width: usize,
    /// Rows that a result depends on: its own and those before it in its document.
    pub kernel: usize,
    /// Whether samples pack several documents.
    pub packed: bool,
}

/// Sizes of the gated delta rule over packed rows: all query heads, all key heads, all value heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeltaDims {
    /// Number of samples.
    pub batch: usize,
    /// Positions per sample.
    pub seq: usize,
    /// Number of key heads, and of query heads.
    pub key_heads: usize,
    /// Number of value heads; value head `h` uses query and key head `h / (value_heads / key_heads)`.
    pub value_heads: usize,
    /// Elements per query or key head.
    pub key_dim: usize,
    /// Elements per value head.
    pub value_dim: usize,
    /// Whether samples pack several documents.
    pub packed: bool,
}

impl ConvolutionDims {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.batch * self.seq
    }
}

impl DeltaDims {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.batch * self.seq
    }

    /// Elements per packed row.
    pub fn width(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Number of value heads that use a key head.
    pub fn group(&self) -> usize {
        self.value_heads / self.key_heads
    }

    /// The most states that backward holds, of all value heads, and the elements of each: those before all chunks but the first
    /// of each document. Documents of a sample have no more such chunks than the sample would as one.
    pub fn states(&self) -> [usize; 2] {
        let chunks = self.batch * (self.seq.saturating_sub(1) / CHUNK);
        [chunks, self.value_heads * self.key_dim * self.value_dim]
    }

    /// Multiplications of products per row: those of [`CHUNK`] keys with each other and with queries, and per value head
    /// those with states and with the values of the chunk. Packed samples count as if they held one document.
    fn multiplications(&self, [of_pairs, of_states, of_values]: [usize; 3]) -> u64 {
        let chunk = CHUNK.min(self.seq);
        let pairs = of_pairs * self.key_heads * chunk * self.key_dim;
        let states = of_states * self.value_heads * self.key_dim * self.value_dim;
        let values = of_values * self.value_heads * chunk * self.value_dim;
        (self.rows() * (pairs + states + values)) as u64
    }

    /// Other operations: some per element, and some per pair of tokens of a chunk and value head, of which the inverse of the
    /// matrix that solves for corrections has a third of a chunk.
    fn others(&self, of_elements: usize, of_pairs: usize) -> usize {
        let chunk = CHUNK.min(self.seq);
        let pairs = self.value_heads * chunk / 2 * (of_pairs + chunk / 3);
        self.rows() * (of_elements * self.width() + pairs)
    }
}

/// Operations of linear attention.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "sizes are what they are called")]
pub enum Delta {
    /// Convolves every element with those of the rows before it in its document, and applies SiLU. The last of the `kernel`
    /// weights of an element is that of its own row.
    Convolve(ConvolutionDims),
    /// Backward of [`Delta::Convolve`], to the weight too if `weight`.
    ConvolveBackward { dims: ConvolutionDims, weight: bool },
    /// The gated delta rule. `gates` holds the logit of `beta` of every value head, then `a` of every value head.
    Scan(DeltaDims),
    /// Backward of [`Delta::Scan`], to `a_log` too if `weight`. (The gradient of `dt_bias` is the sum over rows of that of `a`.)
    ScanBackward { dims: DeltaDims, weight: bool },
}

impl Delta {
    pub(super) fn describe(&self) -> Description {
        match *self {
            Delta::Convolve(dims) | Delta::ConvolveBackward { dims, .. } => self.describe_convolution(dims),
            Delta::Scan(dims) | Delta::ScanBackward { dims, .. } => self.describe_scan(dims),
        }
    }

    fn describe_convolution(&self, dims: ConvolutionDims) -> Description {
        let (len, weights) = (dims.rows() * dims.width, dims.width * dims.kernel);
        let reads = [Role::value("x", len), Role::value("weight", weights)];
        let of = match *self {
            Delta::ConvolveBackward { weight, .. } => Description::new("short_convolution_backward")
                .read(reads)
                .read([Role::value("dy", len)])
                .write([Role::value("dx", len).adds()])
                .write(weight.then(|| Role::gradient("dweight", weights).adds()))
                .flops((7 + (4 + 2 * usize::from(weight)) * dims.kernel) * len),
            _ => Description::new("short_convolution")
                .read(reads)
                .write([Role::value("y", len)])
                .flops((4 + 2 * dims.kernel) * len)
                .recomputed(),
        };
        of.of_documents(if dims.packed { dims.rows() } else { 0 })
    }

    fn describe_scan(&self, dims: DeltaDims) -> Description {
        let DeltaDims { key_heads, value_heads, .. } = dims;
        let is_even = key_heads > 0 && value_heads.is_multiple_of(key_heads);
        assert!(is_even, "{value_heads} value heads do not share {key_heads} key heads evenly");
        let (len, gates) = (dims.rows() * dims.width(), 2 * dims.rows() * value_heads);
        let y_len = dims.rows() * value_heads * dims.value_dim;
        let reads = [
            Role::value("qkv", len),
            Role::value("gates", gates),
            Role::value("a_log", value_heads),
            Role::value("dt_bias", value_heads),
        ];
        let [states, state] = dims.states();
        let of = match *self {
            Delta::ScanBackward { weight, .. } => Description::new("delta_rule_backward")
                .read(reads)
                .read([Role::value("dy", y_len)])
                .write([Role::value("dqkv", len), Role::value("dgates", gates)])
                .write([Role::statistic("states", states * state).scratch()])
                .write(weight.then(|| Role::gradient("da_log", value_heads).adds()))
                .product_flops(2 * dims.multiplications([6, 9, 6]))
                .flops(dims.others(12, 14)),
            _ => Description::new("delta_rule")
                .read(reads)
                .write([Role::value("y", y_len)])
                .product_flops(2 * dims.multiplications([2, 3, 2]))
                .flops(dims.others(5, 6)),
        };
        of.of_documents(if dims.packed { dims.rows() } else { 0 })
    }

    pub(super) fn derive(&self, b: &mut Backward<'_>, node: &Node, output: usize) {
        let Some(dy) = b.take(output) else { return };
        let call = node.main();
        let mut reads: Vec<Operand> = call.reads.iter().map(|read| b.load_operand(*read)).collect();
        reads.push(b.draft.whole(dy));
        match *self {
            Delta::Convolve(dims) => {
                let input = call.reads[0].local().expect("a value is convolved");
                let dx = if b.needs[input] { b.add_to(input) } else { b.scratch(input) };
                let target = b.target(call.reads[1]);
                let op = Delta::ConvolveBackward { dims, weight: target.is_some() };
                b.draft.call(Op::Delta(op), reads, [dx].into_iter().chain(target).collect());
            }
            Delta::Scan(dims) => {
                let inputs = [0, 1].map(|i| call.reads[i].local().expect("heads and gates are values"));
                let places = inputs.map(|input| b.temporary(input));
                let (a_log, dt_bias) = (b.target(call.reads[2]), b.target(call.reads[3]));
                let op = Delta::ScanBackward { dims, weight: a_log.is_some() };
                let ([rows, width], category) = (dims.states(), Category::Workspace);
                let dtype = b.draft.places[places[0]].dtype.master();
                let states = b.draft.place(Decl { rows, width, dtype, category });
                let writes = [places[0], places[1], states].map(|place| (b.draft.whole(place), false));
                b.draft.call(Op::Delta(op), reads, writes.into_iter().chain(a_log).collect());
                if let Some(target) = dt_bias {
                    let (rows, columns) = (dims.rows(), dims.value_heads);
                    let len = (2 * rows - 1) * columns;
                    let da = Operand::Local { id: places[1], offset: columns, len };
                    column_sums(b, [rows, columns, 2 * columns], da, target);
                }
                inputs.into_iter().zip(places).for_each(|(input, place)| b.put(input, place));
            }
            _ => unreachable!("backward has no derivative"),
        }
    }
}

impl Builder<'_> {
    /// Convolves every element with those of earlier rows, and applies SiLU.
    ///
    /// # Errors
    /// If the width does not fit, or samples are cut into chunks.
    pub fn convolve(&mut self, x: Tensor, layer: &Convolution) -> Result<Tensor, Error> {
        self.check("short_convolution", x, layer.width)?;
        self.check_whole_samples()?;
        let ((batch, seq), packed) = (self.batch(), self.is_packed());
        let dims = ConvolutionDims { batch, seq, width: layer.width, kernel: layer.kernel, packed };
        let (y, reads) = (self.rows(layer.width), vec![self.whole(x), self.param(layer.weight)?]);
        let op = Op::Delta(Delta::Convolve(dims));
        self.node(vec![Call::new(op, reads, [(self.whole(y), false)])], None);
        Ok(y)
    }

    /// The gated delta rule over rows of queries, keys and values; `gates` has the logits of `beta`, then `a`.
    ///
    /// # Errors
    /// If a width does not fit, or samples are cut into chunks.
    pub fn delta_rule(&mut self, qkv: Tensor, gates: Tensor, layer: &DeltaGates) -> Result<Tensor, Error> {
        let ((batch, seq), packed) = (self.batch(), self.is_packed());
        let dims = DeltaDims { batch, seq, packed, ..layer.dims };
        self.check("delta_rule", qkv, dims.width())?;
        self.check("delta_rule", gates, 2 * dims.value_heads)?;
        self.check_whole_samples()?;
        let ((), y) = self.in_kept_dtype(&layer.params(), qkv, |b, qkv| {
            let gates = b.converted(gates);
            let params = [b.param(layer.a_log)?, b.param(layer.dt_bias)?];
            let y = b.rows(dims.value_heads * dims.value_dim);
            let reads = [b.whole(qkv), b.whole(gates)].into_iter().chain(params).collect();
            b.node(vec![Call::new(Op::Delta(Delta::Scan(dims)), reads, [(b.whole(y), false)])], None);
            Ok(((), y))
        })?;
        Ok(y)
    }

    /// Refuses samples in chunks, whose states would have to travel from chunk to chunk.
    fn check_whole_samples(&self) -> Result<(), Error> {
        match self.chunks().count {
            1 => Ok(()),
            chunks => Err(self.error(ModelError::LinearAttention { chunks })),
        }
    }
}
