//! Operations as functions of their operands, for checks that call them directly. Sizes are taken from the operands.

use fsdp_core::Error;
use fsdp_core::memory::{Slice, SliceMut};
use fsdp_core::program::GradientTarget;

use crate::backend::{Backend, BatchFacts, Operands, Write};
use crate::layer::Rope;
use crate::op::{
    Activation, Attention, AttentionDims, Dropout, Function, Head, HeadDims, Linear, LinearDims, LogitsDims,
    Lookup, Norm, Op, Pass, Pointwise, Scores,
};

type In<'a, M> = Slice<'a, <M as fsdp_core::Memory>::Buffer>;
type Out<'a, M> = SliceMut<'a, <M as fsdp_core::Memory>::Buffer>;
type Target<'a, M> = GradientTarget<'a, <M as fsdp_core::Memory>::Buffer>;

/// Each operation as a function of its operands.
#[expect(
    missing_docs,
    clippy::missing_errors_doc,
    reason = "they are the operations of `Op`, with the errors of `Backend::run`"
)]
#[expect(clippy::too_many_arguments, reason = "operands one by one")]
pub trait Calls: Backend {
    fn call<const W: usize>(
        &self,
        op: Op,
        reads: &[In<'_, Self>],
        writes: [Out<'_, Self>; W],
    ) -> Result<(), Error> {
        self.run(&op, Operands { reads, writes: &mut writes.map(Write::over), batch: BatchFacts::default() })
    }

    fn call_adding(
        &self,
        op: Op,
        reads: &[In<'_, Self>],
        slice: Out<'_, Self>,
        accumulate: bool,
    ) -> Result<(), Error> {
        self.run(
            &op,
            Operands { reads, writes: &mut [Write { slice, accumulate }], batch: BatchFacts::default() },
        )
    }

    fn call_to(&self, op: Op, reads: &[In<'_, Self>], target: Target<'_, Self>) -> Result<(), Error> {
        self.run(&op, Operands { reads, writes: &mut [target.into()], batch: BatchFacts::default() })
    }

    fn linear(
        &self,
        dims: LinearDims,
        x: In<'_, Self>,
        weight: In<'_, Self>,
        bias: Option<In<'_, Self>>,
        y: Out<'_, Self>,
    ) -> Result<(), Error> {
        let reads: Vec<_> = [x, weight].into_iter().chain(bias).collect();
        self.call(Op::Linear(Linear::Forward { dims, bias: bias.is_some() }), &reads, [y])
    }

    fn linear_backward_input(
        &self,
        dims: LinearDims,
        dy: In<'_, Self>,
        weight: In<'_, Self>,
        dx: Out<'_, Self>,
        accumulate: bool,
    ) -> Result<(), Error> {
        self.call_adding(Op::Linear(Linear::BackwardInput { dims }), &[dy, weight], dx, accumulate)
    }

    fn linear_backward_weight(
        &self,
        dims: LinearDims,
        x: In<'_, Self>,
        dy: In<'_, Self>,
        dweight: Target<'_, Self>,
    ) -> Result<(), Error> {
        self.call_to(Op::Linear(Linear::BackwardWeight { dims }), &[x, dy], dweight)
    }

    fn linear_backward_bias(
        &self,
        dims: LinearDims,
        dy: In<'_, Self>,
        dbias: Target<'_, Self>,
    ) -> Result<(), Error> {
        let LinearDims { rows, outputs: columns, y_stride: stride, .. } = dims;
        self.call_to(Op::Linear(Linear::ColumnSums { rows, columns, stride }), &[dy], dbias)
    }

    fn embedding(
        &self,
        width: usize,
        ids: In<'_, Self>,
        table: In<'_, Self>,
        y: Out<'_, Self>,
        add: bool,
    ) -> Result<(), Error> {
        let table_rows = table.len / width;
        let op = Op::Lookup(Lookup::Embedding { rows: ids.len, width, table_rows, padding: None });
        self.call_adding(op, &[ids, table], y, add)
    }

    fn embedding_backward(
        &self,
        (width, padding): (usize, Option<usize>),
        ids: In<'_, Self>,
        dy: In<'_, Self>,
        dtable: Target<'_, Self>,
    ) -> Result<(), Error> {
        let op = Op::Lookup(Lookup::EmbeddingBackward {
            rows: ids.len,
            width,
            table_rows: dtable.slice.len / width,
            padding,
        });
        self.call_to(op, &[ids, dy], dtable)
    }

    fn rms_norm(
        &self,
        width: usize,
        [eps, offset]: [f64; 2],
        x: In<'_, Self>,
        weight: In<'_, Self>,
        y: Out<'_, Self>,
        rstd: Out<'_, Self>,
    ) -> Result<(), Error> {
        self.call(Op::Norm(Norm::Rms { rows: x.len / width, width, eps, offset }), &[x, weight], [y, rstd])
    }

    fn rms_norm_backward(
        &self,
        (width, offset): (usize, f64),
        x: In<'_, Self>,
        weight: In<'_, Self>,
        rstd: In<'_, Self>,
        dy: In<'_, Self>,
        dx: Out<'_, Self>,
        accumulate: bool,
        dweight: Option<Target<'_, Self>>,
    ) -> Result<(), Error> {
        let op =
            Op::Norm(Norm::RmsBackward { rows: x.len / width, width, offset, weight: dweight.is_some() });
        let mut writes = vec![Write { slice: dx, accumulate }];
        writes.extend(dweight.map(Write::from));
        self.run(
            &op,
            Operands { reads: &[x, weight, rstd, dy], writes: &mut writes, batch: BatchFacts::default() },
        )
    }

    fn layer_norm(
        &self,
        width: usize,
        eps: f64,
        x: In<'_, Self>,
        weight: In<'_, Self>,
        bias: Option<In<'_, Self>>,
        y: Out<'_, Self>,
        stats: Out<'_, Self>,
    ) -> Result<(), Error> {
        let op = Op::Norm(Norm::Layer { rows: x.len / width, width, eps, bias: bias.is_some() });
        let reads: Vec<_> = [x, weight].into_iter().chain(bias).collect();
        self.call(op, &reads, [y, stats])
    }

    fn layer_norm_backward_input(
        &self,
        width: usize,
        x: In<'_, Self>,
        weight: In<'_, Self>,
        stats: In<'_, Self>,
        dy: In<'_, Self>,
        dx: Out<'_, Self>,
        accumulate: bool,
    ) -> Result<(), Error> {
        let op = Op::Norm(Norm::LayerBackwardInput { rows: x.len / width, width });
        self.call_adding(op, &[x, weight, stats, dy], dx, accumulate)
    }

    fn layer_norm_backward_weight(
        &self,
        width: usize,
        x: In<'_, Self>,
        stats: In<'_, Self>,
        dy: In<'_, Self>,
        dweight: Target<'_, Self>,
    ) -> Result<(), Error> {
        let op = Op::Norm(Norm::LayerBackwardWeight { rows: x.len / width, width });
        self.call_to(op, &[x, stats, dy], dweight)
    }

    fn rope(
        &self,
        dims: AttentionDims,
        rope: &Rope,
        qkv: Out<'_, Self>,
        backward: bool,
    ) -> Result<(), Error> {
        let (rope, positions) = (rope.clone(), None);
        self.call(Op::Attention(Attention::Rope { dims, rope, positions, backward }), &[], [qkv])
    }

    fn attention(
        &self,
        dims: AttentionDims,
        (scores, batch): (Scores, BatchFacts<'_>),
        qkv: In<'_, Self>,
        y: Out<'_, Self>,
        lse: Out<'_, Self>,
    ) -> Result<(), Error> {
        let writes = &mut [y, lse].map(Write::over);
        let op = Op::Attention(Attention::Forward { dims, scores });
        self.run(&op, Operands { reads: &[qkv], writes, batch })
    }

    fn attention_backward(
        &self,
        dims: AttentionDims,
        (scores, batch): (Scores, BatchFacts<'_>),
        qkv: In<'_, Self>,
        y: In<'_, Self>,
        lse: In<'_, Self>,
        dy: In<'_, Self>,
        dqkv: Out<'_, Self>,
    ) -> Result<(), Error> {
        let (reads, writes) = (&[qkv, y, lse, dy], &mut [Write::over(dqkv)]);
        self.run(&Op::Attention(Attention::Backward { dims, scores }), Operands { reads, writes, batch })
    }

    fn swiglu(&self, gate: In<'_, Self>, up: In<'_, Self>, y: Out<'_, Self>) -> Result<(), Error> {
        self.call(
            Op::Activation(Activation {
                function: Function::Silu,
                gated: true,
                len: gate.len,
                pass: Pass::Forward,
            }),
            &[gate, up],
            [y],
        )
    }

    fn swiglu_backward(
        &self,
        gate: In<'_, Self>,
        up: In<'_, Self>,
        dy: In<'_, Self>,
        dgate: Out<'_, Self>,
        dup: Out<'_, Self>,
    ) -> Result<(), Error> {
        self.call(
            Op::Activation(Activation {
                function: Function::Silu,
                gated: true,
                len: gate.len,
                pass: Pass::Backward,
            }),
            &[gate, up, dy],
            [dgate, dup],
        )
    }

    fn swiglu_backward_again(
        &self,
        gate: In<'_, Self>,
        up: In<'_, Self>,
        dy: Out<'_, Self>,
        dgate: Out<'_, Self>,
        dup: Out<'_, Self>,
    ) -> Result<(), Error> {
        self.call(
            Op::Activation(Activation {
                function: Function::Silu,
                gated: true,
                len: gate.len,
                pass: Pass::BackwardRecompute,
            }),
            &[gate, up],
            [dy, dgate, dup],
        )
    }

    fn gelu(&self, x: In<'_, Self>, y: Out<'_, Self>) -> Result<(), Error> {
        self.call(
            Op::Activation(Activation {
                function: Function::GeluTanh,
                gated: false,
                len: x.len,
                pass: Pass::Forward,
            }),
            &[x],
            [y],
        )
    }

    fn gelu_backward(&self, x: In<'_, Self>, dy: In<'_, Self>, dx: Out<'_, Self>) -> Result<(), Error> {
        self.call(
            Op::Activation(Activation {
                function: Function::GeluTanh,
                gated: false,
                len: x.len,
                pass: Pass::Backward,
            }),
            &[x, dy],
            [dx],
        )
    }

    fn gelu_backward_again(
        &self,
        x: In<'_, Self>,
        dy: Out<'_, Self>,
        dx: Out<'_, Self>,
    ) -> Result<(), Error> {
        self.call(
            Op::Activation(Activation {
                function: Function::GeluTanh,
                gated: false,
                len: x.len,
                pass: Pass::BackwardRecompute,
            }),
            &[x],
            [dy, dx],
        )
    }

    fn add(&self, a: In<'_, Self>, b: In<'_, Self>, y: Out<'_, Self>) -> Result<(), Error> {
        self.call(Op::Pointwise(Pointwise::Add { len: a.len }), &[a, b], [y])
    }

    fn head_logits(
        &self,
        dims: HeadDims,
        x: In<'_, Self>,
        weight: In<'_, Self>,
        logits: Out<'_, Self>,
    ) -> Result<(), Error> {
        self.call(Op::Head(Head::Logits { dims }), &[x, weight], [logits])
    }

    fn dropout(&self, dropout: Dropout<'_>, x: Out<'_, Self>) -> Result<(), Error> {
        let op = Op::Pointwise(Pointwise::Dropout { len: x.len, samples: dropout.keys.len(), p: dropout.p });
        self.run(
            &op,
            Operands {
                reads: &[],
                writes: &mut [Write::over(x)],
                batch: BatchFacts::with_keys(dropout.keys),
            },
        )
    }

    fn head_loss(
        &self,
        dims: HeadDims,
        x: In<'_, Self>,
        weight: In<'_, Self>,
        targets: In<'_, Self>,
        (losses, z_losses): (Out<'_, Self>, Option<Out<'_, Self>>),
        logits: Out<'_, Self>,
    ) -> Result<(), Error> {
        let op = Op::Head(Head::Loss { dims });
        match z_losses {
            None => self.call(op, &[x, weight, targets], [losses, logits]),
            Some(z_losses) => self.call(op, &[x, weight, targets], [losses, logits, z_losses]),
        }
    }

    fn head_loss_backward(
        &self,
        dims: HeadDims,
        x: In<'_, Self>,
        weight: In<'_, Self>,
        targets: In<'_, Self>,
        (losses, z_losses): (Out<'_, Self>, Option<Out<'_, Self>>),
        logits: Out<'_, Self>,
        dlogits: Option<Out<'_, Self>>,
        dx: Out<'_, Self>,
        dweight: Option<Target<'_, Self>>,
    ) -> Result<(), Error> {
        let op =
            Op::Head(Head::LossBackward { dims, weight: dweight.is_some(), is_rounded: dlogits.is_some() });
        let mut writes: Vec<_> = [losses, logits, dx].map(Write::over).into();
        writes.extend(dweight.map(Write::from));
        writes.extend(dlogits.into_iter().chain(z_losses).map(Write::over));
        self.run(
            &op,
            Operands { reads: &[x, weight, targets], writes: &mut writes, batch: BatchFacts::default() },
        )
    }

    fn cross_entropy(
        &self,
        vocab: usize,
        logits: In<'_, Self>,
        targets: In<'_, Self>,
        losses: Out<'_, Self>,
    ) -> Result<(), Error> {
        self.call(
            Op::Head(Head::CrossEntropy { dims: LogitsDims::new(targets.len, vocab) }),
            &[logits, targets],
            [losses],
        )
    }

    fn cross_entropy_backward(
        &self,
        vocab: usize,
        logits: Out<'_, Self>,
        targets: In<'_, Self>,
        losses: Out<'_, Self>,
        gradient: Option<Out<'_, Self>>,
    ) -> Result<(), Error> {
        let op = Op::Head(Head::CrossEntropyBackward {
            dims: LogitsDims::new(targets.len, vocab),
            is_rounded: gradient.is_some(),
        });
        let mut writes: Vec<_> = [logits, losses].map(Write::over).into();
        writes.extend(gradient.map(Write::over));
        self.run(&op, Operands { reads: &[targets], writes: &mut writes, batch: BatchFacts::default() })
    }
}

impl<M: Backend> Calls for M {}
