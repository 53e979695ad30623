//! Mixtures of experts: each row goes through some of several linear maps, and returns as their weighted sum (Shazeer
//! et al., 2017; Switch Transformers: Fedus et al., 2021; Mixtral: Jiang et al., 2024).
//!
//! A *route* is the assignment of a row to an expert. Every row has `top` routes, so there are always `rows * top`,
//! independent of the router, and buffer sizes are known before a step. Routed rows occupy *slots*, ordered by
//! expert, then by row. No row is dropped, and the order of every sum is determined by the micro-batch alone.
//!
//! Experts may be cut into chunks of consecutive ones. The sum over a row's experts is then the tree over chunks of the
//! sums within each, so the ranks of an expert axis, which have some chunks each, compute the same bits as one rank. Each
//! gathers the rows of all ranks of the axis, and gradients of its experts are apart for the rows of each of them.

use fsdp_core::memory::Category;
use fsdp_core::model::ParamId;
use fsdp_core::{DType, Error};

use super::describe::{Description, Role};
use super::expert_products;
use super::gating::{Gating, Scoring};
use super::linear::Orientation;
use super::router_terms::RouterTerms;
use super::routing::Routing;
use crate::error::ModelError;
use crate::graph::{Backward, Builder, Call, Node, Operand, Tensor};
use crate::op::Op;
use crate::quantized::{Format, Packed};

/// The linear map of each expert: `y = x W`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertDims {
    /// Columns of `x`.
    pub inputs: usize,
    /// Columns of `y`.
    pub outputs: usize,
    /// Storage order of the weights.
    pub orientation: Orientation,
    /// How the weights are stored, if not as floats; outputs are rows then.
    pub format: Option<Format>,
}

impl ExpertDims {
    fn weight(&self) -> usize {
        self.inputs * self.outputs
    }

    /// The matrix of a weight, if it is not stored as floats.
    pub fn packed(&self) -> Option<Packed> {
        self.format.map(|format| Packed { rows: self.outputs, columns: self.inputs, format })
    }

    /// What a product reads for each of some experts, and the scratch to decode one after the other into.
    pub(super) fn weight_roles(&self, experts: usize) -> (Vec<Role>, Option<Role>) {
        let Some(packed) = self.packed() else {
            return (vec![Role::value("weight", self.weight()); experts], None);
        };
        let stored = packed.stored();
        let decoded = Role::value("decoded", self.weight()).scratch().touching(experts * self.weight());
        (vec![Role::bytes("weight", stored.rows * stored.row_bytes); experts], Some(decoded))
    }
}

/// Operations of mixtures. `routes` holds the expert of every route, row by row.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "sizes are what they are called")]
pub enum Experts {
    /// Selects the `top` best experts of every row, in descending order (of equal ones, the first), and their weights, as
    /// `gating` says. In training also computes the *load*: the number of routes to each expert, the sum of its
    /// probabilities, and the z-loss and the sequence-wise loss, if there are any, over the rows up to the last counted
    /// target of each sample.
    Route { routing: Routing, gating: Gating, load: Option<RouterTerms> },
    /// Backward of [`Experts::Route`] from the gradients of the weights, and from the terms of the loss; a balancing loss
    /// uses the loads of all mixtures.
    RouteBackward { routing: Routing, gating: Gating, terms: Option<RouterTerms> },
    /// The balancing loss of a micro-batch from the loads of all mixtures, times its coefficient and the number of
    /// counted targets.
    BalanceLoss { terms: RouterTerms },
    /// Copies to every slot the row that is routed there.
    Dispatch { routing: Routing, width: usize },
    /// Sums the slots of every row, in the order of its routes.
    DispatchBackward { routing: Routing, width: usize },
    /// Multiplies slots by the weight of their expert; the result may be added to `y`.
    Product { routing: Routing, dims: ExpertDims },
    /// The gradient of slots.
    ProductBackwardInput { routing: Routing, dims: ExpertDims },
    /// The gradient of the weight of one expert, by its number among those here, over the rows of one source; zero if none
    /// is routed to it.
    ProductBackwardWeight { routing: Routing, dims: ExpertDims, source: usize, expert: usize },
    /// Adds to slots the bias of their expert.
    AddBias { routing: Routing, width: usize },
    /// The gradient of the bias of one expert, as [`Experts::ProductBackwardWeight`].
    BiasBackward { routing: Routing, width: usize, source: usize, expert: usize },
    /// Sums the slots of every row, times their weights, in the order of its routes.
    Combine { routing: Routing, width: usize },
    /// Backward of [`Experts::Combine`], to slots and weights.
    CombineBackward { routing: Routing, width: usize },
}

impl Experts {
    pub(super) fn describe(&self) -> Description {
        match *self {
            Experts::Route { routing, gating, load } => describe_route(routing, gating, load),
            Experts::RouteBackward { routing, terms, .. } => describe_route_backward(routing, terms),
            Experts::BalanceLoss { terms } => Description::new("balance_loss")
                .read([Role::double("loads", terms.loads_len())])
                .write([Role::double("loss", 1)])
                .flops(terms.loads_len() + terms.load_len()),
            Experts::Dispatch { routing, .. }
            | Experts::DispatchBackward { routing, .. }
            | Experts::Product { routing, .. }
            | Experts::ProductBackwardInput { routing, .. }
            | Experts::ProductBackwardWeight { routing, .. }
            | Experts::AddBias { routing, .. }
            | Experts::BiasBackward { routing, .. }
            | Experts::Combine { routing, .. }
            | Experts::CombineBackward { routing, .. } => self.describe_routed(routing),
        }
    }

    /// Describes the operations on routed rows.
    fn describe_routed(&self, routing: Routing) -> Description {
        let (slots, rows) = (routing.slots(), routing.all_rows());
        let (expected, experts) = (routing.expected_slots(), routing.here().len());
        let routes = Role::ids("routes", routing.routes());
        let all = |width: usize| (slots * width, rows * width);
        match *self {
            Experts::Dispatch { width, .. } => Description::new("dispatch")
                .read([Role::value("x", all(width).1), routes])
                .write([Role::value("y", all(width).0)])
                .recomputed(),
            Experts::DispatchBackward { width, .. } => Description::new("dispatch_backward")
                .read([Role::value("dy", all(width).0), routes])
                .write([Role::value("dx", all(width).1).adds()])
                .flops(expected * width),
            Experts::Product { dims, .. } => expert_products::describe(routing, dims, true),
            Experts::ProductBackwardInput { dims, .. } => expert_products::describe(routing, dims, false),
            Experts::ProductBackwardWeight { dims: ExpertDims { inputs, outputs, .. }, expert, .. } => {
                let part = routing.expected_slots_of(expert);
                Description::new("expert_product_backward_weight")
                    .read([
                        Role::value("x", slots * inputs).touching(part * inputs),
                        Role::value("dy", slots * outputs).touching(part * outputs),
                        routes,
                    ])
                    .write([Role::gradient("dweight", inputs * outputs).adds()])
                    .products(1, [outputs, inputs, part])
            }
            Experts::AddBias { width, .. } => Description::new("expert_bias")
                .read([routes])
                .read(vec![Role::value("bias", width); experts])
                .write([Role::value("y", slots * width).updated().touching(expected * width)])
                .flops(expected * width),
            Experts::BiasBackward { width, expert, .. } => {
                let part = routing.expected_slots_of(expert);
                Description::new("expert_bias_backward")
                    .read([Role::value("dy", slots * width).touching(part * width), routes])
                    .write([Role::gradient("dbias", width).adds()])
                    .flops(part * width)
            }
            Experts::Combine { width, .. } => Description::new("combine")
                .read([Role::value("x", all(width).0), Role::value("weights", routing.routes()), routes])
                .write([Role::value("y", all(width).1)])
                .flops(2 * expected * width),
            Experts::CombineBackward { width, .. } => Description::new("combine_backward")
                .read([
                    Role::value("x", all(width).0),
                    Role::value("weights", routing.routes()),
                    routes,
                    Role::value("dy", all(width).1),
                ])
                .write([Role::value("dx", all(width).0), Role::value("dweights", routing.routes())])
                .flops(3 * expected * width),
            _ => unreachable!("{self:?} is described by itself"),
        }
    }

    pub(super) fn derive(&self, b: &mut Backward<'_>, node: &Node, output: usize) {
        match *self {
            Experts::Route { routing, gating, load } => {
                let Some(dweights) = b.take(output) else { return };
                let call = node.main();
                let logits = call.reads[0].local().expect("logits are a value");
                let (read, routes) = (b.load(logits), call.writes[1].0);
                let Some(place) = b.overwrite(logits) else { return };
                let terms = load.and_then(RouterTerms::any);
                let op = Op::Experts(Experts::RouteBackward { routing, gating, terms });
                let mut reads = vec![b.draft.whole(read), routes, b.draft.whole(dweights)];
                reads.extend(terms.and_then(RouterTerms::balancing).map(|_| Operand::Loads));
                b.draft.call(op, reads, vec![(b.draft.whole(place), false)]);
                b.put(logits, place);
            }
            Experts::Dispatch { routing, width } => {
                let Some(dy) = b.take(output) else { return };
                let reads = &node.main().reads;
                let input = reads[0].local().expect("rows are a value");
                if b.needs[input] {
                    let (dy, dx) = (b.draft.whole(dy), b.add_to(input));
                    let op = Op::Experts(Experts::DispatchBackward { routing, width });
                    b.draft.call(op, vec![dy, reads[1]], vec![dx]);
                }
            }
            Experts::Product { .. } => expert_products::derive(b, node, output),
            Experts::AddBias { routing, width } => {
                let Some(dy) = b.take(output) else { return };
                let (routes, biases) = (node.main().reads[0], &node.main().reads[1..]);
                for (expert, bias) in biases.iter().enumerate() {
                    let Some(target) = b.target(*bias) else { continue };
                    for source in 0..routing.sources() {
                        let op = Op::Experts(Experts::BiasBackward { routing, width, source, expert });
                        b.draft.call(op, vec![b.draft.whole(dy), routes], vec![target]);
                    }
                }
                b.put(node.update.expect("it works in place"), dy);
            }
            Experts::Combine { routing, width } => {
                let Some(dy) = b.take(output) else { return };
                let reads = node.main().reads.clone();
                let [x, weights] = [0, 1].map(|read| reads[read].local().expect("these are values"));
                let [read_x, read_weights] = [x, weights].map(|value| b.load(value));
                let [dx, dweights] = [x, weights].map(|value| b.temporary(value));
                let call = vec![read_x, read_weights].into_iter().map(|place| b.draft.whole(place));
                let call = call.chain([reads[2], b.draft.whole(dy)]).collect();
                let writes = [dx, dweights].map(|place| (b.draft.whole(place), false)).to_vec();
                b.draft.call(Op::Experts(Experts::CombineBackward { routing, width }), call, writes);
                b.put(x, dx);
                b.put(weights, dweights);
            }
            _ => unreachable!("{} is not an operation of forward", self.describe().name),
        }
    }
}

fn describe_route(routing: Routing, gating: Gating, load: Option<RouterTerms>) -> Description {
    let Routing { rows, experts, .. } = routing;
    let slots = routing.slots();
    Description::new("route")
        .read([Role::value("logits", rows * experts)])
        .read(gating.biased.then(|| Role::value("bias", experts)))
        .write([Role::value("weights", slots), Role::ids("routes", slots)])
        .write(load.map(|terms| Role::double("load", terms.load_len())))
        .of_counted(if load.is_some() { rows } else { 0 })
        .flops((5 + load.map_or(0, |terms| 1 + term_flops(terms, [3, 5]))) * rows * experts)
}

/// Operations per logit for a z-loss and a sequence-wise loss, if there are any.
fn term_flops(terms: RouterTerms, [z_loss, sequence]: [usize; 2]) -> usize {
    let of = |coefficient: f64, flops| if coefficient == 0.0 { 0 } else { flops };
    of(terms.z_loss, z_loss) + of(terms.sequence, sequence)
}

fn describe_route_backward(routing: Routing, terms: Option<RouterTerms>) -> Description {
    let Routing { rows, experts, .. } = routing;
    let slots = routing.slots();
    let described = Description::new("route_backward")
        .read([
            Role::value("logits", rows * experts),
            Role::ids("routes", slots),
            Role::value("dweights", slots),
        ])
        .write([Role::value("dlogits", rows * experts)]);
    let Some(terms) = terms else { return described.flops(8 * rows * experts) };
    let more = term_flops(terms, [6, 1]) * rows * experts;
    let described = described.of_counted(rows);
    match terms.balancing() {
        None => described.flops(8 * rows * experts + more),
        Some(terms) => described
            .read([Role::double("loads", terms.loads_len())])
            .flops(13 * rows * experts + more + terms.loads_len()),
    }
}

/// The routes of all rows of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct Routes {
    pub(super) routing: Routing,
    pub(super) routes: Tensor,
}

impl Builder<'_> {
    /// Routes every row by its logits (one per expert) and, if `gating` is biased, the parameter `bias`; returns the
    /// routes and their weights.
    ///
    /// # Errors
    /// If the bias does not belong to the block.
    pub fn route(
        &mut self,
        logits: Tensor,
        top: usize,
        gating: Gating,
        bias: Option<ParamId>,
    ) -> Result<(Routes, Tensor), Error> {
        let routing = Routing::whole(self.row_count(), logits.width(), top);
        let weights = self.rows(top);
        let routes = self.value(top, DType::U32, Category::Workspace);
        let mut writes = vec![(self.whole(weights), false), (self.whole(routes), false)];
        let load = self.router_terms();
        writes.extend(load.map(|_| (Operand::Load, false)));
        let op = Op::Experts(Experts::Route { routing, gating, load });
        let mut reads = vec![self.whole(logits)];
        if let Some(bias) = bias {
            reads.push(self.param(bias)?);
        }
        self.node(vec![Call::new(op, reads, writes)], None);
        Ok((Routes { routing, routes }, weights))
    }

    /// Gives the rows of a mixture, their routes and weights to the ranks of the expert axis, if its experts are cut.
    ///
    /// # Errors
    /// If the chunks do not divide the experts.
    pub fn to_experts(
        &mut self,
        x: Tensor,
        routes: &Routes,
        weights: Tensor,
    ) -> Result<(Tensor, Routes, Tensor), Error> {
        let (chunks, experts) = (self.expert_chunks(), routes.routing.experts);
        if !experts.is_multiple_of(chunks.count) {
            return Err(self.error(ModelError::ExpertChunks { experts, chunks: chunks.count }));
        }
        let routing = Routing { chunks, ..routes.routing };
        let gathered = self.rounds(routing, x.width()).is_none().then(|| self.gather_rows(x));
        let weights = self.gather_rows(weights);
        let routes = Routes { routing, routes: self.gather_routes(routes.routes) };
        let x = gathered.unwrap_or_else(|| self.send_rows(x, &routes));
        Ok((x, routes, weights))
    }

    /// Copies rows to the slots of all routes.
    pub fn dispatch(&mut self, x: Tensor, routes: &Routes) -> Tensor {
        let routing = routes.routing;
        let width = x.width() / routing.sources();
        let y = self.rows(x.width() * routing.slots_per_row());
        let op = Op::Experts(Experts::Dispatch { routing, width });
        let reads = vec![self.whole(x), self.whole(routes.routes)];
        self.node(vec![Call::new(op, reads, [(self.whole(y), false)])], None);
        y
    }

    /// Multiplies every row by the logistic function of its logit: a mixture of one expert, which has all rows.
    ///
    /// # Errors
    /// If there is not one logit per row.
    pub fn weigh_rows(&mut self, x: Tensor, logits: Tensor) -> Result<Tensor, Error> {
        self.check("weigh_rows", logits, 1)?;
        let routing = Routing::whole(self.row_count(), 1, 1);
        let gating = Gating { scoring: Scoring::Sigmoid, ..Gating::softmax(false) };
        let weights = self.rows(1);
        let routes = self.value(1, DType::U32, Category::Workspace);
        let op = Op::Experts(Experts::Route { routing, gating, load: None });
        let writes = [(self.whole(weights), false), (self.whole(routes), false)];
        self.node(vec![Call::new(op, vec![self.whole(logits)], writes)], None);
        let y = self.rows(x.width());
        let op = Op::Experts(Experts::Combine { routing, width: x.width() });
        let reads = [x, weights, routes].map(|read| self.whole(read)).to_vec();
        self.node(vec![Call::new(op, reads, [(self.whole(y), false)])], None);
        Ok(y)
    }

    /// Returns the weighted sum of the slots of every row, over the experts of all ranks.
    pub fn combine(&mut self, x: Tensor, weights: Tensor, routes: &Routes) -> Tensor {
        let routing = routes.routing;
        let y = self.rows(x.width() / routing.slots_per_row());
        let op = Op::Experts(Experts::Combine { routing, width: y.width() / routing.sources() });
        let reads: Vec<Operand> = [x, weights, routes.routes].iter().map(|read| self.whole(*read)).collect();
        self.node(vec![Call::new(op, reads, [(self.whole(y), false)])], None);
        self.return_rows(y, routes)
    }
}

#[cfg(test)]
mod tests {
    use fsdp_core::DType;

    use super::*;

    #[test]
    fn expert_flops_count_only_routed_rows() {
        let routing = Routing::whole(7, 5, 2);
        let cost = |op| Op::Experts(op).cost(DType::F32, DType::F32).product_flops;
        let dims = ExpertDims { inputs: 3, outputs: 4, orientation: Orientation::OutIn, format: None };
        let forward = 2 * 14 * 3 * 4;
        assert_eq!(cost(Experts::Product { routing, dims }), forward);
        assert_eq!(cost(Experts::ProductBackwardInput { routing, dims }), forward);
        let weight = |expert| cost(Experts::ProductBackwardWeight { routing, dims, source: 0, expert });
        assert_eq!((0..5).map(weight).sum::<u64>(), forward);
    }
}
