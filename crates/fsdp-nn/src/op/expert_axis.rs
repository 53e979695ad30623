//! Redistribution over the expert axis: the ranks that have different experts exchange the rows of mixtures.
//!
//! Every rank gathers the rows of all, and sums of experts' outputs are reduced where the rows came from; the sizes do not
//! depend on what routers decide. A row is sent as often as there are other ranks: no more often than to each of its
//! experts, while the axis is not larger than the experts of a row. On larger axes, rows are sent only where they
//! have an expert ([`Rounds`]). Both have the same results, except in rows that nothing reads.

use fsdp_core::DType;
use fsdp_core::memory::Category;

use super::describe::{Description, Role};
use super::experts::Routes;
use super::rounds::Rounds;
use super::routing::Routing;
use crate::graph::{Backward, Builder, Call, Decl, Node, Tensor};
use crate::op::Op;

/// A redistribution over `ranks` ranks, with `len` elements of each. It is run by the program, not by the backend: other
/// ranks are reached through the communicator of the axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "sizes are what they are called")]
pub enum ExpertAxis {
    /// The values of all ranks, in their order.
    AllGather { ranks: usize, len: usize },
    /// As `AllGather`, of the experts of routes.
    AllGatherRoutes { ranks: usize, len: usize },
    /// The sums over ranks of the parts that are of this one, in the order of the tree.
    ReduceScatter { ranks: usize, len: usize },
    /// As `AllGather`, of the rows that have an expert on this rank; the others are zero.
    Send(Rounds),
    /// As `ReduceScatter`, of the parts of ranks that have an expert of the row.
    Return(Rounds),
}

impl ExpertAxis {
    pub(super) fn describe(self) -> Description {
        match self {
            ExpertAxis::AllGather { ranks, len } => Description::new("all_gather_rows")
                .read([Role::value("x", len)])
                .write([Role::value("y", ranks * len)]),
            ExpertAxis::AllGatherRoutes { ranks, len } => Description::new("all_gather_routes")
                .read([Role::ids("x", len)])
                .write([Role::ids("y", ranks * len)]),
            ExpertAxis::ReduceScatter { ranks, len } => Description::new("reduce_scatter_rows")
                .read([Role::value("x", ranks * len)])
                .write([Role::value("y", len)])
                .flops((ranks - 1) * len),
            ExpertAxis::Send(rounds) => describe_rounds("send_rows", rounds, [1, rounds.ranks()]),
            ExpertAxis::Return(rounds) => describe_rounds("return_rows", rounds, [rounds.ranks(), 1])
                .flops((rounds.ranks() - 1) * rounds.routing.rows * rounds.width),
        }
    }

    /// What one rank reads is added up from all that have it, and the gradient of a sum is that of each of its parts.
    pub(super) fn derive(self, b: &mut Backward<'_>, node: &Node, output: usize) {
        let Some(dy) = b.take(output) else { return };
        let back = match self {
            ExpertAxis::AllGather { ranks, len } => ExpertAxis::ReduceScatter { ranks, len },
            ExpertAxis::ReduceScatter { ranks, len } => ExpertAxis::AllGather { ranks, len },
            ExpertAxis::Send(rounds) => ExpertAxis::Return(rounds),
            ExpertAxis::Return(rounds) => ExpertAxis::Send(rounds),
            ExpertAxis::AllGatherRoutes { .. } => unreachable!("routes have no gradient"),
        };
        let call = node.main();
        let input = call.reads[0].local().expect("a value is redistributed");
        let Some(place) = b.overwrite(input) else { return };
        let reads = std::iter::once(b.draft.whole(dy)).chain(call.reads[1..].iter().copied()).collect();
        let mut writes = vec![(b.draft.whole(place), false)];
        let scratch = call.writes[1..].iter().filter_map(|(scratch, _)| scratch.local());
        writes.extend(scratch.map(|scratch| b.scratch(scratch)));
        b.draft.call(Op::ExpertAxis(back), reads, writes);
        b.put(input, place);
    }
}

/// Describes rounds, given how many ranks the rows are from that are read and written.
fn describe_rounds(name: &'static str, rounds: Rounds, [read, written]: [usize; 2]) -> Description {
    let rows = rounds.routing.rows * rounds.width;
    let staged = |name| Role::value(name, rounds.sent()).scratch();
    Description::new(name)
        .read([Role::value("x", read * rows), Role::ids("routes", rounds.routing.routes())])
        .write([Role::value("y", written * rows), staged("sent"), staged("received")])
        .write([Role::ids("ids", rounds.ids()).scratch()])
}

impl Builder<'_> {
    /// The rows of all ranks of the expert axis.
    pub(super) fn gather_rows(&mut self, x: Tensor) -> Tensor {
        let y = |b: &mut Self, width| b.rows(width);
        self.gather(x, y, |ranks, len| ExpertAxis::AllGather { ranks, len })
    }

    /// The rows of all ranks of the expert axis that have an expert here, sent in rounds.
    pub(super) fn send_rows(&mut self, x: Tensor, routes: &Routes) -> Tensor {
        let rounds = Rounds { routing: routes.routing, width: x.width() };
        let y = self.rows(rounds.ranks() * x.width());
        self.run_rounds(ExpertAxis::Send(rounds), rounds, [x, routes.routes, y])
    }

    /// This rank's rows of the sum over the ranks of the expert axis.
    pub(super) fn return_rows(&mut self, x: Tensor, routes: &Routes) -> Tensor {
        let width = x.width() / routes.routing.sources();
        let Some(rounds) = self.rounds(routes.routing, width) else { return self.sum_rows(x) };
        let y = self.rows(width);
        self.run_rounds(ExpertAxis::Return(rounds), rounds, [x, routes.routes, y])
    }

    /// The rounds that move rows of a width, if that is less than to gather them.
    pub(super) fn rounds(&self, routing: Routing, width: usize) -> Option<Rounds> {
        let rounds = Rounds { routing, width };
        (self.sends_rows() && rounds.pay()).then_some(rounds)
    }

    fn run_rounds(&mut self, op: ExpertAxis, rounds: Rounds, [x, routes, y]: [Tensor; 3]) -> Tensor {
        let staged = Decl {
            rows: rounds.ranks() * rounds.capacity(),
            width: rounds.width,
            dtype: self.dtype(),
            category: Category::Workspace,
        };
        let ids = Decl { rows: rounds.ids(), width: 1, dtype: DType::U32, ..staged };
        let mut writes = vec![(self.whole(y), false)];
        writes.extend([staged, staged, ids].map(|decl| (self.declare(decl), false)));
        self.node(vec![Call::new(Op::ExpertAxis(op), vec![self.whole(x), self.whole(routes)], writes)], None);
        y
    }

    /// The routes of all ranks of the expert axis.
    pub(super) fn gather_routes(&mut self, x: Tensor) -> Tensor {
        let y = |b: &mut Self, width| b.value(width, DType::U32, Category::Workspace);
        self.gather(x, y, |ranks, len| ExpertAxis::AllGatherRoutes { ranks, len })
    }

    fn gather(
        &mut self,
        x: Tensor,
        value: impl FnOnce(&mut Self, usize) -> Tensor,
        op: impl FnOnce(usize, usize) -> ExpertAxis,
    ) -> Tensor {
        let ranks = self.expert_chunks().ranks();
        if ranks == 1 {
            return x;
        }
        let y = value(self, ranks * x.width());
        self.redistribute(op(ranks, self.row_count() * x.width()), x, y)
    }

    /// This rank's rows of the sum over the ranks of the expert axis.
    fn sum_rows(&mut self, x: Tensor) -> Tensor {
        let ranks = self.expert_chunks().ranks();
        if ranks == 1 {
            return x;
        }
        let y = self.rows(x.width() / ranks);
        self.redistribute(ExpertAxis::ReduceScatter { ranks, len: self.row_count() * y.width() }, x, y)
    }

    fn redistribute(&mut self, op: ExpertAxis, x: Tensor, y: Tensor) -> Tensor {
        let call = Call::new(Op::ExpertAxis(op), vec![self.whole(x)], [(self.whole(y), false)]);
        self.node(vec![call], None);
        y
    }
}
