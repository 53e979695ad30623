//! The linear maps of experts: products of slots with the weights of their experts.
//!
//! An adapter of experts (LoRA) is two more such products: by the `A` and by the `B` of each slot's expert.

use fsdp_core::Error;

use super::describe::{Description, Role};
use super::experts::{ExpertDims, Experts, Routes};
use super::linear::Orientation;
use super::routing::Routing;
use crate::graph::{Backward, Builder, Call, Node, Tensor};
use crate::layer::{self, Adapter, ExpertMaps};
use crate::op::Op;
use crate::quantized::Packed;

/// Describes the products of slots with the weights of their experts: forward, or for the gradient of the slots.
pub(super) fn describe(routing: Routing, dims: ExpertDims, is_forward: bool) -> Description {
    let (slots, ExpertDims { inputs, outputs, .. }) = (routing.slots(), dims);
    let (weights, decoded) = dims.weight_roles(routing.here().len());
    let (x, y) = (slots * inputs, slots * outputs);
    let (name, from, to, sizes) = match is_forward {
        true => ("expert_product", Role::value("x", x), Role::value("y", y).adds(), [outputs, inputs]),
        false => {
            let (dy, dx) = (Role::value("dy", y), Role::value("dx", x).adds());
            ("expert_product_backward_input", dy, dx, [inputs, outputs])
        }
    };
    Description::new(name)
        .read([from, Role::ids("routes", routing.routes())])
        .read(weights)
        .write([to])
        .write(decoded)
        .products(1, [routing.expected_slots(), sizes[0], sizes[1]])
        .flops(decoded.map_or(0, |role| role.touched))
}

/// Derives products. An in-place node adds its product to a value, whose gradient is the gradient of the sum.
pub(super) fn derive(b: &mut Backward<'_>, node: &Node, output: usize) {
    let gradient = b.gradients[output];
    derive_products(b, node);
    if let (Some(addend), Some(gradient)) = (node.update, gradient) {
        b.put(addend, gradient);
    }
}

/// Derives products of the same slots, each with its own output.
fn derive_products(b: &mut Backward<'_>, node: &Node) {
    let gradients: Vec<(&Call, Experts, usize)> = (node.calls.iter())
        .filter_map(|call| {
            let Op::Experts(op) = call.op else { unreachable!("{} is not a product", call.op.name()) };
            let output = call.writes[0].0.local().expect("forward writes values");
            Some((call, op, b.take(output)?))
        })
        .collect();
    let Some((first, ..)) = gradients.first() else { return };
    let (input, routes) = (first.reads[0].local().expect("slots are a value"), first.reads[1]);
    let trains = |b: &Backward<'_>| {
        gradients.iter().any(|(call, ..)| call.reads[2..].iter().any(|weight| b.target(*weight).is_some()))
    };
    if trains(b) {
        let x = b.load(input);
        for (call, op, dy) in &gradients {
            let Experts::Product { routing, dims } = *op else { continue };
            for (expert, weight) in call.reads[2..].iter().enumerate() {
                let Some(target) = b.target(*weight) else { continue };
                for source in 0..routing.sources() {
                    let op = Experts::ProductBackwardWeight { routing, dims, source, expert };
                    let reads = vec![b.draft.whole(x), b.draft.whole(*dy), routes];
                    b.draft.call(Op::Experts(op), reads, vec![target]);
                }
            }
        }
    }
    if b.needs[input] {
        for (call, op, dy) in &gradients {
            let Experts::Product { routing, dims } = *op else { continue };
            let mut writes = vec![b.add_to(input)];
            let decoded = call.writes[1..].iter().filter_map(|(decoded, _)| decoded.local());
            writes.extend(decoded.map(|decoded| b.scratch(decoded)));
            let reads = [b.draft.whole(*dy), routes].into_iter().chain(call.reads[2..].iter().copied());
            let op = Experts::ProductBackwardInput { routing, dims };
            b.draft.call(Op::Experts(op), reads.collect(), writes);
        }
    }
}

impl Routes {
    /// The most slots that a row has, which are those of all sources.
    fn slots_of_row(&self) -> usize {
        self.routing.sources() * self.routing.slots_per_row()
    }
}

impl Builder<'_> {
    /// Applies several linear maps to the slots, each slot with the weight of its expert, plus the contributions of adapters.
    ///
    /// # Errors
    /// If a width does not fit, or a parameter does not belong to the block.
    pub fn expert_products(
        &mut self,
        x: Tensor,
        routes: &Routes,
        maps: &[ExpertMaps],
    ) -> Result<Vec<Tensor>, Error> {
        let slots = routes.slots_of_row();
        let mut outputs: Vec<Tensor> = maps.iter().map(|maps| self.rows(maps.dims.outputs * slots)).collect();
        let products = maps.iter().zip(&outputs).map(|(maps, y)| self.expert_product(x, routes, maps, *y));
        let calls = products.collect::<Result<_, _>>()?;
        self.node(calls, None);
        self.adapted_experts(x, routes, maps, &mut outputs)?;
        for (y, maps) in outputs.iter_mut().zip(maps).filter(|(_, maps)| !maps.biases.is_empty()) {
            let biases = maps.biases[..routes.routing.here().len()].iter().map(|bias| self.param(*bias));
            let reads =
                std::iter::once(Ok(self.whole(routes.routes))).chain(biases).collect::<Result<_, _>>()?;
            let op = Op::Experts(Experts::AddBias { routing: routes.routing, width: maps.dims.outputs });
            *y = self.in_place(*y, op, reads, None);
        }
        Ok(outputs)
    }

    /// The product of the slots with the weights of one linear map.
    fn expert_product(
        &mut self,
        x: Tensor,
        routes: &Routes,
        maps: &ExpertMaps,
        y: Tensor,
    ) -> Result<Call, Error> {
        let routing = routes.routing;
        let dims = match self.quantized(maps.weights[0]) {
            Some(Packed { format, .. }) => {
                ExpertDims { orientation: Orientation::OutIn, format: Some(format), ..maps.dims }
            }
            None => maps.dims,
        };
        self.check("expert_product", x, dims.inputs * routes.slots_of_row())?;
        let mut reads = vec![self.whole(x), self.whole(routes.routes)];
        // The experts here are called by the parameters of the first block of the layout.
        for &weight in &maps.weights[..routing.here().len()] {
            reads.push(self.param(weight)?);
        }
        let mut writes = vec![(self.whole(y), false)];
        writes.extend(dims.packed().map(|matrix| (self.decoded(matrix), false)));
        Ok(Call::new(Op::Experts(Experts::Product { routing, dims }), reads, writes))
    }

    /// Adds the contributions of adapters to the outputs of linear maps of the same slots, which share `A`.
    fn adapted_experts(
        &mut self,
        x: Tensor,
        routes: &Routes,
        maps: &[ExpertMaps],
        outputs: &mut [Tensor],
    ) -> Result<(), Error> {
        let Some(Adapter { scale, .. }) = self.adapter(maps[0].weights[0]) else { return Ok(()) };
        let down = self.expert_products(x, routes, &[self.half(&maps[0], |adapter| adapter.down)])?;
        let low = self.scale(down[0], scale);
        for (maps, y) in maps.iter().zip(outputs) {
            let sum = self.rows(y.width());
            let up = self.half(maps, |adapter| adapter.up);
            let mut call = self.expert_product(low, routes, &up, sum)?;
            call.writes[0].1 = true;
            self.node(vec![call], Some(*y));
            *y = sum;
        }
        Ok(())
    }

    /// One of the two matrices that adapt the weight of each expert.
    fn half(&self, maps: &ExpertMaps, half: impl Fn(Adapter) -> layer::Linear) -> ExpertMaps {
        let adapter = |&weight| self.adapter(weight).expect("all experts of a mixture are adapted");
        let halves: Vec<layer::Linear> = maps.weights.iter().map(|weight| half(adapter(weight))).collect();
        let layer::Linear { inputs, outputs, orientation, .. } = halves[0];
        let weights = halves.iter().map(|half| half.weight).collect();
        ExpertMaps { weights, ..ExpertMaps::new(inputs, outputs, orientation) }
    }
}
