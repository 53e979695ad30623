//! Causal self-attention over packed projections, and rotary position embedding.

use fsdp_core::Error;

use super::describe::{Description, Role};
use crate::graph::{Backward, Builder, Call, Node, Operand, Tensor};
use crate::layer;
use crate::op::{Dropout, Op};

/// Sizes of causal self-attention with grouped queries over packed projections.
///
/// A packed row holds `heads` query heads, then `kv_heads` key heads, then `kv_heads` value heads, each of
/// `head_dim` elements; query head `h` reads key/value head `h / (heads / kv_heads)`. Rows are ordered by
/// (sample, position).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionDims {
    /// Number of samples.
    pub batch: usize,
    /// Positions per sample.
    pub seq: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
}

impl AttentionDims {
    /// Elements per packed row.
    pub fn packed(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.batch * self.seq
    }

    /// Number of elements of the output.
    pub fn output_len(&self) -> usize {
        self.rows() * self.heads * self.head_dim
    }
}

/// Which scores are computed beyond causality, and the transformations of scores and probabilities.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Scores {
    /// Dropout rate of attention probabilities, or 0. The counter of an element is
    /// `(head * seq + query) * seq + key`.
    pub dropout: f64,
    /// Factor of the scores; `None` for `1 / sqrt(head_dim)`. Set by Gemma 2 and Granite.
    pub scale: Option<f64>,
    /// Soft cap: scaled scores `x` become `cap * tanh(x / cap)` before the softmax (Gemma 2). `None` for no cap.
    pub softcap: Option<f64>,
    /// Sliding window, at least 1: a query sees itself and the `window - 1` keys before it (Mistral). Scores outside
    /// it are not computed. `None` for no window.
    pub window: Option<usize>,
    /// Whether samples pack several documents. A query sees only keys of its own document; other scores are not
    /// computed. The documents are passed as facts of the micro-batch ([`BatchFacts`](crate::backend::BatchFacts)).
    pub packed: bool,
}

impl Scores {
    /// Default scores with dropout rate `p`.
    pub fn dropping(p: f64) -> Self {
        Self { dropout: p, ..Self::default() }
    }

    /// Returns the factor of the scores for heads of `head_dim` elements.
    pub fn scale(&self, head_dim: usize) -> f64 {
        self.scale.unwrap_or_else(|| 1.0 / (head_dim as f64).sqrt())
    }

    /// Position of the first key that a query sees; the last one is the query itself.
    pub fn first_key(&self, query: usize) -> usize {
        self.window.map_or(0, |window| (query + 1).saturating_sub(window))
    }

    /// Number of scores computed: each query with the keys that it sees. Packed samples count as if they held one
    /// document, because the number of documents is not part of the shape.
    fn count(&self, dims: &AttentionDims) -> usize {
        let seq = dims.seq;
        let window = self.window.map_or(seq, |window| window.min(seq));
        dims.batch * dims.heads * (window * (window + 1) / 2 + (seq - window) * window)
    }

    /// Returns the dropout with these keys, or `None` if nothing is dropped.
    pub fn dropout<'a>(&self, keys: &'a [u64]) -> Option<Dropout<'a>> {
        (self.dropout > 0.0).then_some(Dropout { p: self.dropout, keys })
    }
}

/// Operations of attention.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "sizes are what they are called")]
pub enum Attention {
    /// Rotary position embedding of the query and key heads of packed rows, in the Hugging Face convention: with
    /// `n / 2` frequencies, the first `n` elements of a head rotate, element `i` together with element `i + n / 2`.
    /// `backward` rotates the other way. The position of a row is its index within the sample, unless `positions` says
    /// below what number those are that are read: of samples that are packed, cut into chunks or continued.
    Rope { dims: AttentionDims, rope: layer::Rope, positions: Option<usize>, backward: bool },
    /// Causal attention, and the log-sum-exp of every (sample, head, position).
    Forward { dims: AttentionDims, scores: Scores },
    /// Backward of [`Attention::Forward`], with or without sinks.
    Backward { dims: AttentionDims, scores: Scores },
    /// Turns the output of [`Attention::Forward`] into that of attention with *sinks* (gpt-oss): each query head has one
    /// more score, given for every row and head, which takes its share of the probability and has no value. The output
    /// shrinks, the log-sum-exp grows.
    Sink { dims: AttentionDims },
    /// The gradients of the scores of sinks, from the results of [`Attention::Sink`].
    SinkBackward { dims: AttentionDims },
}

impl Attention {
    pub(super) fn describe(&self) -> Description {
        let (Attention::Rope { dims, .. }
        | Attention::Forward { dims, .. }
        | Attention::Backward { dims, .. }
        | Attention::Sink { dims }
        | Attention::SinkBackward { dims }) = self;
        let is_even = dims.kv_heads > 0 && dims.heads.is_multiple_of(dims.kv_heads);
        assert!(is_even, "{} query heads do not share {} key heads evenly", dims.heads, dims.kv_heads);
        let packed = dims.rows() * dims.packed();
        let (qkv, y) = (Role::value("qkv", packed), Role::value("y", dims.output_len()));
        let lse = Role::statistic("lse", dims.rows() * dims.heads);
        let pairs = |scores: &Scores| (scores.count(dims) * dims.head_dim) as u64;
        let is_capped = |scores: &Scores| usize::from(scores.softcap.is_some());
        if let Attention::Forward { scores, .. } | Attention::Backward { scores, .. } = self {
            assert!(scores.window != Some(0), "a query sees itself, so a window has at least one key");
        }
        match self {
            Attention::Rope { rope, positions, backward, .. } => {
                let of_head = rope.rotary_dim();
                assert!(of_head <= dims.head_dim, "{of_head} elements of a head of {} rotate", dims.head_dim);
                let rotated = dims.rows() * (dims.heads + dims.kv_heads) * of_head;
                Description::new(if *backward { "rope_backward" } else { "rope" })
                    .read(positions.map(|_| Role::ids("positions", dims.rows())))
                    .write([qkv.updated().touching(rotated)])
                    .flops(3 * rotated)
            }
            // Scores and the output. A score is scaled, shifted, exponentiated, added and divided; a cap divides,
            // takes tanh and multiplies.
            Attention::Forward { scores, .. } => Description::new("attention")
                .read([qkv])
                .write([y, lse])
                .product_flops(2 * 2 * pairs(scores))
                .flops((5 + 3 * is_capped(scores)) * scores.count(dims))
                .drops(scores.dropout, dims.batch)
                .of_documents(if scores.packed { dims.rows() } else { 0 }),
            // Scores again, and gradients of probabilities, queries, keys and values. A cap also has a derivative.
            Attention::Backward { scores, .. } => Description::new("attention_backward")
                .read([qkv, y, lse, Role::value("dy", dims.output_len())])
                .write([Role::value("dqkv", packed)])
                .product_flops(5 * 2 * pairs(scores))
                .flops((6 + 6 * is_capped(scores)) * scores.count(dims) + 2 * dims.output_len())
                .drops(scores.dropout, dims.batch)
                .of_documents(if scores.packed { dims.rows() } else { 0 }),
            Attention::Sink { .. } => Description::new("attention_sink")
                .read([Role::value("sinks", dims.rows() * dims.heads)])
                .write([y.updated(), lse.updated()])
                .flops(dims.output_len() + 6 * dims.rows() * dims.heads),
            Attention::SinkBackward { .. } => Description::new("attention_sink_backward")
                .read([
                    Role::value("sinks", dims.rows() * dims.heads),
                    y,
                    lse,
                    Role::value("dy", dims.output_len()),
                ])
                .write([Role::value("dsinks", dims.rows() * dims.heads)])
                .flops(2 * dims.output_len() + 3 * dims.rows() * dims.heads),
        }
    }

    pub(super) fn derive(&self, b: &mut Backward<'_>, node: &Node, output: usize) {
        match self {
            Attention::Rope { dims, rope, positions, .. } => {
                let (rope, positions) = (rope.clone(), *positions);
                let op = Attention::Rope { dims: *dims, rope, positions, backward: true };
                b.in_place(node, output, Op::Attention(op));
            }
            Attention::Forward { dims, scores } => {
                let Some(dy) = b.take(output) else { return };
                derive_attention(b, node.main(), (*dims, *scores), dy);
            }
            Attention::Sink { dims } => {
                let Some(dy) = b.take(output) else { return };
                let [attention, sink] = &node.calls[..] else { unreachable!("a sink follows attention") };
                let Op::Attention(Attention::Forward { scores, .. }) = attention.op else {
                    unreachable!("a sink follows attention")
                };
                derive_attention(b, attention, (*dims, scores), dy);
                let value = sink.reads[0].local().expect("the scores of sinks are a value");
                let Some(dsinks) = b.overwrite(value) else { return };
                let op = Op::Attention(Attention::SinkBackward { dims: *dims });
                let reads = vec![sink.reads[0], sink.writes[0].0, sink.writes[1].0, b.draft.whole(dy)];
                b.draft.call(op, reads, vec![(b.draft.whole(dsinks), false)]);
                b.put(value, dsinks);
            }
            Attention::Backward { .. } | Attention::SinkBackward { .. } => {
                unreachable!("backward has no derivative")
            }
        }
    }
}

/// Adds the backward of a call of [`Attention::Forward`], from the gradient of its output.
fn derive_attention(b: &mut Backward<'_>, call: &Call, (dims, scores): (AttentionDims, Scores), dy: usize) {
    let input = call.reads[0].local().expect("attention reads a value");
    let Some(dqkv) = b.overwrite(input) else { return };
    let qkv = b.load_operand(call.reads[0]);
    let reads = vec![qkv, call.writes[0].0, call.writes[1].0, b.draft.whole(dy)];
    let op = Op::Attention(Attention::Backward { dims, scores });
    let backward = Call::new(op, reads, [(b.draft.whole(dqkv), false)]);
    b.draft.calls.push(Call { site: call.site, ..backward });
    b.put(input, dqkv);
}

impl Builder<'_> {
    /// Rotates the queries and keys of packed rows.
    ///
    /// # Errors
    /// If the width does not fit.
    pub fn rope(
        &mut self,
        qkv: Tensor,
        heads: &layer::Attention,
        rope: &layer::Rope,
    ) -> Result<Tensor, Error> {
        self.check("rope", qkv, heads.packed())?;
        let dims = heads.dims(self.batch());
        let (rope, positions) = (rope.clone(), self.reads_positions().then(|| self.length()));
        let op = Op::Attention(Attention::Rope { dims, rope, positions, backward: false });
        let reads = positions.map(|_| Operand::Positions).into_iter().collect();
        Ok(self.in_place(qkv, op, reads, None))
    }

    /// Causal self-attention of packed rows of whole samples, and the scores of their sinks, if there are any.
    pub(super) fn attend(&mut self, qkv: Tensor, sinks: Option<Tensor>, heads: &layer::Attention) -> Tensor {
        let site = self.site(heads.dropout);
        let length = self.length();
        let scores = Scores {
            dropout: site.map_or(0.0, |_| heads.dropout),
            scale: heads.scale,
            softcap: heads.softcap,
            // A window that excludes no key is dropped.
            window: heads.window.filter(|&window| window < length),
            packed: self.is_packed(),
        };
        let dims = heads.dims(self.batch());
        let op = Op::Attention(Attention::Forward { dims, scores });
        let widths = [heads.heads * heads.head_dim, heads.heads];
        let (reads, sinks) = (vec![self.whole(qkv)], sinks.map(|sinks| self.whole(sinks)));
        self.with_statistics((op, reads), widths, site, |writes| {
            let op = Op::Attention(Attention::Sink { dims });
            sinks.map(|sinks| Call::new(op, vec![sinks], writes))
        })
    }
}

#[cfg(test)]
mod tests {
    use fsdp_core::DType;

    use super::*;

    #[test]
    fn softcap_adds_flops_per_score_and_no_bytes() {
        let dims = AttentionDims { batch: 2, seq: 3, heads: 4, kv_heads: 2, head_dim: 8 };
        let (plain, capped) = (Scores::default(), Scores { softcap: Some(50.0), ..Scores::default() });
        let cost = |op| Op::Attention(op).cost(DType::Bf16, DType::F32);
        let forward = |scores| cost(Attention::Forward { dims, scores });
        let backward = |scores| cost(Attention::Backward { dims, scores });
        // With 3 positions, the queries see 1 + 2 + 3 keys.
        let scores = 2 * 4 * 6;
        assert_eq!(forward(capped).flops(), forward(plain).flops() + 3 * scores);
        assert_eq!(backward(capped).flops(), backward(plain).flops() + 6 * scores);
        assert_eq!(forward(capped).bytes(), forward(plain).bytes());
        assert_eq!(backward(capped).product_flops, backward(plain).product_flops);
    }

    #[test]
    fn window_costs_only_visible_pairs() {
        let dims = AttentionDims { batch: 2, seq: 7, heads: 4, kv_heads: 2, head_dim: 8 };
        for (window, pairs) in [(1, 7), (3, 1 + 2 + 5 * 3), (7, 28), (9, 28)] {
            let scores = Scores { window: Some(window), ..Scores::default() };
            let seen: usize = (0..dims.seq).map(|query| query + 1 - scores.first_key(query)).sum();
            assert_eq!(seen, pairs);
            let cost = |op| Op::Attention(op).cost(DType::Bf16, DType::F32).product_flops;
            let of_pairs = (2 * 4 * pairs * 8) as u64;
            assert_eq!(cost(Attention::Forward { dims, scores }), 2 * 2 * of_pairs);
            assert_eq!(cost(Attention::Backward { dims, scores }), 5 * 2 * of_pairs);
        }
    }

    #[test]
    fn rope_cost_is_proportional_to_rotary_dim() {
        let dims = AttentionDims { batch: 2, seq: 3, heads: 4, kv_heads: 2, head_dim: 8 };
        let cost = |rotary_dim| {
            let rope = layer::Rope::new(100.0, rotary_dim);
            Op::Attention(Attention::Rope { dims, rope, positions: None, backward: false })
                .cost(DType::Bf16, DType::F32)
        };
        assert_eq!(cost(2).flops() * 4, cost(8).flops());
        assert_eq!(cost(2).bytes() * 4, cost(8).bytes());
    }
}
