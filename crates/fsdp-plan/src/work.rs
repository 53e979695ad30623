//! What a step asks of a device, in sizes: products, attention, bytes. Prices are made of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use fsdp_core::model::BlockId;
use fsdp_core::plan::Plan;
use fsdp_core::program::ForwardMode;
use fsdp_core::schedule::{BufferId, Op, OpKind, Place, Role, Schedule};
use fsdp_core::update::{Products, RankTables};
use fsdp_nn::footprint::RunShape;
use fsdp_nn::graph::Step;
use fsdp_nn::listing::Listing;
use fsdp_nn::model::unsharded::BlockCall;
use fsdp_nn::op::{Attention, Head, Op as CallOp};

use crate::measured::Point;

/// Products of one shape: of `m x k` with `k x n` matrices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Product {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Terms of each sum.
    pub k: usize,
    /// How many; of experts that share rows, not a whole number.
    pub count: f64,
}

impl Product {
    /// Floating-point operations of all of them.
    pub fn flops(&self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64 * self.count
    }
}

/// One call of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionWork {
    /// Floating-point operations of its products, those that causality leaves.
    pub flops: f64,
    /// Samples times heads.
    pub sequences: f64,
    /// Positions.
    pub seq: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Whether it is the backward.
    pub is_backward: bool,
}

/// What a call of a block asks for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CallWork {
    /// Its products, in the order in which they run.
    pub products: Vec<Product>,
    /// Its calls of attention.
    pub attention: Vec<AttentionWork>,
    /// Bytes that everything else reads and writes, but for logits.
    pub elementwise_bytes: f64,
    /// Logits that are made.
    pub logits: f64,
    /// The same again, operation by operation: what [measured points](crate::measured) are of.
    pub listed: Vec<Listed>,
}

/// An operation that a call of a block lists.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Listed {
    /// What it is called.
    pub op: &'static str,
    /// Of products rows, columns and terms; of attention sequences, positions and elements of a head; of all else bytes, and ones.
    pub size: [f64; 3],
    /// Floating-point operations of products; of all else bytes.
    pub work: f64,
}

impl Listed {
    /// A step of a list.
    pub fn of(step: &Step, shape: RunShape) -> Self {
        let described = step.call.op.describe();
        let cost = step.call.cost(shape.dtype, shape.gradient_dtype);
        let flops = cost.product_flops as f64;
        let (size, work) = match &step.call.op {
            CallOp::Attention(Attention::Forward { dims, .. } | Attention::Backward { dims, .. }) => {
                ([dims.batch * dims.heads, dims.seq, dims.head_dim].map(|size| size as f64), flops)
            }
            _ => match described.matmul {
                Some(size) => (size.map(|size| size as f64), flops),
                None => ([cost.bytes() as f64, 1.0, 1.0], cost.bytes() as f64),
            },
        };
        Self { op: described.name, size, work }
    }
}

/// What an operation of the schedule asks for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OpWork {
    /// Elements of all buffers that are read.
    pub elements_read: f64,
    /// Their bytes.
    pub bytes_read: f64,
    /// Elements of all buffers that are written.
    pub elements_written: f64,
    /// Their bytes.
    pub bytes_written: f64,
    /// Bytes of operands in host memory; those that are written count twice.
    pub host_bytes: f64,
    /// Products of an update, of the type of the master parameters.
    pub products: Vec<Product>,
}

/// What the calls of a micro-batch ask for.
#[derive(Clone, Debug)]
pub struct Calls {
    /// Those that are alike once.
    pub kinds: Vec<CallWork>,
    /// Which of these a call of a block is.
    kind_of: BTreeMap<(BlockId, CallKind), usize>,
}

/// What a step asks for.
#[derive(Clone, Debug)]
pub struct StepWork {
    /// By call.
    pub calls: Arc<Calls>,
    /// By operation of the schedule.
    pub ops: Vec<OpWork>,
}

/// What is called of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CallKind {
    /// Forward, the first time.
    Forward,
    /// Forward, again for backward.
    Recompute,
    /// The last block, with the loss: forward, with backward or without.
    LastBlock,
    /// Backward.
    Backward,
}

impl CallKind {
    /// What a call is.
    pub fn of(call: BlockCall) -> Self {
        match call {
            BlockCall::Forward(_, ForwardMode::Recompute) => CallKind::Recompute,
            BlockCall::Forward(..) => CallKind::Forward,
            BlockCall::ForwardBackward(_) | BlockCall::Evaluate(_) => CallKind::LastBlock,
            BlockCall::Backward(_) => CallKind::Backward,
        }
    }
}

impl Calls {
    /// What listed calls ask for.
    pub fn new(shape: RunShape, listed: &[(BlockCall, Listing)]) -> Self {
        let mut kinds: Vec<&Listing> = Vec::new();
        let mut kind_of = BTreeMap::new();
        for (call, listing) in listed {
            let index = kinds.iter().position(|known| *known == listing).unwrap_or_else(|| {
                kinds.push(listing);
                kinds.len() - 1
            });
            kind_of.insert((call.block(), CallKind::of(*call)), index);
        }
        Self { kinds: kinds.iter().map(|listing| CallWork::of(listing, shape)).collect(), kind_of }
    }

    /// Which kind a call of a block is.
    ///
    /// # Panics
    /// When it was not listed.
    pub fn kind(&self, block: BlockId, kind: CallKind) -> usize {
        self.kind_of[&(block, kind)]
    }
}

impl StepWork {
    /// What the step of a plan asks for, on the rank of these tables.
    pub fn new(plan: &Plan, calls: Arc<Calls>, tables: &RankTables) -> Self {
        let ops = plan.step.ops.iter().map(|op| OpWork::of(&plan.step, op, tables)).collect();
        Self { calls, ops }
    }

    /// What the call that an operation makes asks for, if it makes one.
    pub fn call(&self, op: &Op) -> Option<&CallWork> {
        let call = BlockCall::of(op.kind)?;
        Some(&self.calls.kinds[self.calls.kind(call.block(), CallKind::of(call))])
    }
}

impl CallWork {
    /// What a listing asks for.
    pub fn of(listing: &Listing, shape: RunShape) -> Self {
        let mut work = Self::default();
        listing.list.steps.iter().for_each(|step| work.add(step, shape));
        work
    }

    fn add(&mut self, step: &Step, shape: RunShape) {
        self.listed.push(Listed::of(step, shape));
        match &step.call.op {
            CallOp::Attention(Attention::Forward { dims, .. } | Attention::Backward { dims, .. }) => {
                let cost = step.call.cost(shape.dtype, shape.gradient_dtype);
                self.attention.push(AttentionWork {
                    flops: cost.product_flops as f64,
                    sequences: (dims.batch * dims.heads) as f64,
                    seq: dims.seq,
                    head_dim: dims.head_dim,
                    is_backward: matches!(&step.call.op, CallOp::Attention(Attention::Backward { .. })),
                });
            }
            CallOp::Head(Head::Loss { dims }) => {
                self.logits += (dims.rows * dims.vocab) as f64;
                self.head([dims.rows, dims.hidden, dims.vocab], dims.chunk_rows, 1);
            }
            CallOp::Head(Head::LossBackward { dims, weight, .. }) => {
                self.logits += (dims.rows * dims.vocab) as f64;
                self.head([dims.rows, dims.hidden, dims.vocab], dims.chunk_rows, 2 + usize::from(*weight));
            }
            op => {
                let cost = step.call.cost(shape.dtype, shape.gradient_dtype);
                match op.describe().matmul {
                    Some([m, n, k]) => {
                        let count = cost.product_flops as f64 / (2.0 * m as f64 * n as f64 * k as f64);
                        self.products.push(Product { m, n, k, count });
                    }
                    None => self.elementwise_bytes += cost.bytes() as f64,
                }
            }
        }
    }

    /// The first so many of: logits, their gradient to the hidden states, and to the weight.
    fn head(&mut self, [rows, hidden, vocab]: [usize; 3], chunk: usize, products: usize) {
        let chunk = chunk.clamp(1, rows.max(1));
        let count = rows as f64 / chunk as f64;
        let all = [(chunk, vocab, hidden), (chunk, hidden, vocab), (vocab, hidden, chunk)];
        let all = all.map(|(m, n, k)| Product { m, n, k, count });
        self.products.extend(&all[..products]);
    }

    /// Floating-point operations of products and attention.
    pub fn flops(&self) -> f64 {
        let products: f64 = self.products.iter().map(Product::flops).sum();
        products + self.attention.iter().map(|attention| attention.flops).sum::<f64>()
    }
}

impl OpWork {
    /// Its sizes, as those of a [point](crate::measured): bytes, those that are written twice because they are read before, and
    /// elements.
    pub fn point(&self) -> Point {
        let bytes = (self.bytes_read + 2.0 * self.bytes_written).max(1.0);
        let elements = (self.elements_read + self.elements_written).max(1.0);
        Point { ranks: 1, size: vec![bytes, elements], work: bytes, seconds: 0.0 }
    }

    fn of(schedule: &Schedule, op: &Op, tables: &RankTables) -> Self {
        let mut work = Self::default();
        if let OpKind::Update(unit) = op.kind {
            let products = tables.unit(unit).products.iter();
            work.products = products
                .map(|&Products { m, n, k, count }| Product { m, n, k, count: count as f64 })
                .collect();
        }
        let mut sizes = |ids: &[BufferId], passes: f64| {
            let decls = ids.iter().map(|&id| schedule.buffer(id));
            let decls = decls.filter(|decl| !matches!(decl.role, Role::Scalars | Role::SpareScalars));
            decls.fold((0.0, 0.0), |(elements, bytes), decl| {
                let len = decl.len_on(tables);
                let own = (len * decl.dtype.size_bytes()) as f64;
                if decl.place == Place::Host {
                    work.host_bytes += passes * own;
                }
                (elements + len as f64, bytes + own)
            })
        };
        let (read, written) = (sizes(&op.reads, 1.0), sizes(&op.writes, 2.0));
        (work.elements_read, work.bytes_read) = read;
        (work.elements_written, work.bytes_written) = written;
        work
    }
}
