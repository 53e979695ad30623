//! The work of a step, in sizes: products, attention, bytes. Prices are computed from it.

use std::collections::BTreeMap;
use std::sync::Arc;

use fsdp_core::model::BlockId;
use fsdp_core::plan::Plan;
use fsdp_core::program::{BlockCall, ForwardMode};
use fsdp_core::schedule::{BufferId, Op, OpKind, Place, Role, Schedule};
use fsdp_core::update::{Products, RankTables};
use fsdp_core::{DType, Group};
use fsdp_nn::footprint::RunShape;
use fsdp_nn::graph::Step;
use fsdp_nn::listing::Listing;
use fsdp_nn::op::{Attention, ExpertAxis, Head, Op as CallOp, Rounds};

use crate::measured::Point;

/// Matrix products of one shape: `m x k` by `k x n`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Product {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Terms of each inner product.
    pub k: usize,
    /// Number of products; not a whole number for experts that share rows.
    pub count: f64,
}

impl Product {
    /// Floating-point operations of all products together.
    pub fn flops(&self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64 * self.count
    }
}

/// One call of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionWork {
    /// Floating-point operations of its products, without those that causality masks.
    pub flops: f64,
    /// Samples times heads.
    pub sequences: f64,
    /// Sequence length.
    pub seq: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Whether it is a backward call.
    pub is_backward: bool,
}

/// The work of one call of a block.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CallWork {
    /// Its products, in execution order.
    pub products: Vec<Product>,
    /// Its attention calls.
    pub attention: Vec<AttentionWork>,
    /// Bytes read and written by everything else, except logits.
    pub elementwise_bytes: f64,
    /// Number of logits computed.
    pub logits: f64,
    /// The values that are redistributed among ranks: over which group, and the bytes of all its ranks.
    pub redistributed: Vec<(Group, f64)>,
    /// The same work by operation, as the key to [measured points](crate::measured).
    pub listed: Vec<Listed>,
}

/// An operation within a call of a block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Listed {
    /// The name of the operation.
    pub op: &'static str,
    /// Rows, columns and terms of products; sequences, positions and elements of a head of attention; `[bytes, 1, 1]`
    /// of all other operations.
    pub size: [f64; 3],
    /// Floating-point operations of products and attention; bytes of all other operations.
    pub work: f64,
}

impl Listed {
    /// Describes one step of an operation list.
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

/// The work of an operation of the schedule.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OpWork {
    /// Elements of all buffers that are read.
    pub elements_read: f64,
    /// Bytes of all buffers that are read.
    pub bytes_read: f64,
    /// Elements of all buffers that are written.
    pub elements_written: f64,
    /// Bytes of all buffers that are written.
    pub bytes_written: f64,
    /// Bytes of operands in host memory; written operands count twice.
    pub host_bytes: f64,
    /// Products of an update, in the dtype of the master parameters.
    pub products: Vec<Product>,
}

/// The work of the block calls of a micro-batch.
#[derive(Clone, Debug)]
pub struct Calls {
    /// The distinct calls; equal calls are stored once.
    pub kinds: Vec<CallWork>,
    /// Index in `kinds` of each call of a block.
    kind_of: BTreeMap<(BlockId, CallKind), usize>,
}

/// The work of a step.
#[derive(Clone, Debug)]
pub struct StepWork {
    /// The work of block calls.
    pub calls: Arc<Calls>,
    /// The work of each operation of the schedule, in program order.
    pub ops: Vec<OpWork>,
}

/// The kind of a block call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CallKind {
    /// The first forward.
    Forward,
    /// A repeated forward, for backward.
    Recompute,
    /// The last block, including the loss: forward, with or without backward.
    LastBlock,
    /// Backward.
    Backward,
}

impl CallKind {
    /// Returns the kind of a call.
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
    /// Computes the work of listed calls.
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

    /// Returns the index in `kinds` of a call of a block.
    ///
    /// # Panics
    /// When the call was not listed.
    pub fn kind(&self, block: BlockId, kind: CallKind) -> usize {
        self.kind_of[&(block, kind)]
    }
}

impl StepWork {
    /// Computes the work of a plan's step, on the rank of these tables.
    pub fn new(plan: &Plan, calls: Arc<Calls>, tables: &RankTables) -> Self {
        let ops = plan.step.ops.iter().map(|op| OpWork::of(&plan.step, op, tables)).collect();
        Self { calls, ops }
    }

    /// Returns the work of the block call that an operation makes; `None` if it makes none.
    pub fn call(&self, op: &Op) -> Option<&CallWork> {
        let call = op.kind.call()?;
        Some(&self.calls.kinds[self.calls.kind(call.block(), CallKind::of(call))])
    }
}

impl CallWork {
    /// Computes the work of a listing.
    pub fn of(listing: &Listing, shape: RunShape) -> Self {
        let mut work = Self::default();
        listing.list.steps.iter().for_each(|step| work.add(step, shape));
        work
    }

    fn add(&mut self, step: &Step, shape: RunShape) {
        let redistributed = match step.call.op {
            // An all-to-all moves as many bytes as an all-gather of a value of this size.
            CallOp::Exchange(exchange) => {
                Some((Group::CONTEXT, exchange.here * exchange.chunks * exchange.part, shape.dtype))
            }
            CallOp::ExpertAxis(ExpertAxis::AllGatherRoutes { ranks, len }) => {
                Some((Group::EXPERT, ranks * len, DType::U32))
            }
            CallOp::ExpertAxis(
                ExpertAxis::AllGather { ranks, len } | ExpertAxis::ReduceScatter { ranks, len },
            ) => Some((Group::EXPERT, ranks * len, shape.dtype)),
            CallOp::ExpertAxis(ExpertAxis::Send(rounds) | ExpertAxis::Return(rounds)) => {
                Some((Group::EXPERT, rounds.sent(), shape.dtype))
            }
            _ => None,
        };
        if let Some((group, elements, dtype)) = redistributed {
            let times = match step.call.op {
                CallOp::ExpertAxis(ExpertAxis::Send(_) | ExpertAxis::Return(_)) => Rounds::EXPECTED,
                _ => 1,
            };
            let bytes = (elements * dtype.size_bytes()) as f64;
            self.redistributed.extend(vec![(group, bytes); times]);
            return;
        }
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

    /// Adds the first `products` of: logits, their gradient to the hidden states, and their gradient to the weight.
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
    /// Its sizes as a [point](crate::measured): bytes (written ones count twice, because they are also read) and
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
                let buffer_bytes = (len * decl.dtype.size_bytes()) as f64;
                if decl.place == Place::Host {
                    work.host_bytes += passes * buffer_bytes;
                }
                (elements + len as f64, bytes + buffer_bytes)
            })
        };
        let (read, written) = (sizes(&op.reads, 1.0), sizes(&op.writes, 2.0));
        (work.elements_read, work.bytes_read) = read;
        (work.elements_written, work.bytes_written) = written;
        work
    }
}
