//! Redistribution over the expert axis: the ranks that have different experts exchange the rows of mixtures.
//!
//! Every rank gathers the rows of all, and sums of experts' outputs are reduced where the rows came from. The sizes do not
//! depend on what routers decide, and a row is sent as often as there are other ranks: no more often than to each of
//! its experts, while the axis is not larger than the experts of a row.

use fsdp_core::DType;
use fsdp_core::memory::Category;

use super::describe::{Description, Role};
use crate::graph::{Backward, Builder, Call, Node, Tensor};
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
        }
    }

    /// The number of ranks, and of elements of each.
    pub fn sizes(self) -> [usize; 2] {
        match self {
            ExpertAxis::AllGather { ranks, len }
            | ExpertAxis::AllGatherRoutes { ranks, len }
            | ExpertAxis::ReduceScatter { ranks, len } => [ranks, len],
        }
    }

    /// What one rank reads is added up from all that have it, and the gradient of a sum is that of each of its parts.
    pub(super) fn derive(self, b: &mut Backward<'_>, node: &Node, output: usize) {
        let Some(dy) = b.take(output) else { return };
        let back = match self {
            ExpertAxis::AllGather { ranks, len } => ExpertAxis::ReduceScatter { ranks, len },
            ExpertAxis::ReduceScatter { ranks, len } => ExpertAxis::AllGather { ranks, len },
            ExpertAxis::AllGatherRoutes { .. } => unreachable!("routes have no gradient"),
        };
        let input = node.main().reads[0].local().expect("a value is redistributed");
        let Some(place) = b.overwrite(input) else { return };
        b.draft.call(Op::ExpertAxis(back), vec![b.draft.whole(dy)], vec![(b.draft.whole(place), false)]);
        b.put(input, place);
    }
}

impl Builder<'_> {
    /// The rows of all ranks of the expert axis.
    pub(super) fn gather_rows(&mut self, x: Tensor) -> Tensor {
        let y = |b: &mut Self, width| b.rows(width);
        self.gather(x, y, |ranks, len| ExpertAxis::AllGather { ranks, len })
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
    pub(super) fn sum_rows(&mut self, x: Tensor) -> Tensor {
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
