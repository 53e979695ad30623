//! Rows that are routed to experts, and the slots that they use, found by sorting.

use super::kit::{Kit, Operand, integers};
use crate::backend::Backend;
use crate::cuts::Chunks;
use crate::op::Routing;

/// The routes of all rows of a mixture. Slots that are unused have no meaning.
#[derive(Clone)]
pub(crate) struct Routed {
    pub(crate) routing: Routing,
    /// The expert of every route.
    pub(crate) routes: Vec<u32>,
    /// The route of every slot.
    pub(crate) route_of_slot: Vec<Option<usize>>,
}

impl Routed {
    /// Routes every row to different experts in several chunks, never to the second expert of those that are here. All
    /// others are an odd number, or at least twice as many as a row has routes.
    pub(crate) fn new(routing: Routing, seed: u64) -> Self {
        let without_rows = routing.here().start + 1;
        let experts: Vec<usize> = (0..routing.experts).filter(|&expert| expert != without_rows).collect();
        let firsts = integers(seed + 7, routing.all_rows(), experts.len());
        let expert =
            |first: u32, choice: usize| experts[(first as usize + 2 * choice) % experts.len()] as u32;
        let routes: Vec<u32> = (firsts.into_iter())
            .flat_map(|first| (0..routing.top).map(move |choice| (first, choice)))
            .map(|(first, choice)| expert(first, choice))
            .collect();
        let route_of_slot = sorted(routing, &routes);
        Self { routing, routes, route_of_slot }
    }

    pub(crate) fn ids<M: Backend>(&self, kit: &Kit<M>) -> Operand<M::Buffer> {
        kit.ids(&self.routes)
    }

    /// Returns an operand with these values of slots, and NaN in unused ones.
    pub(crate) fn put<M: Backend>(&self, kit: &Kit<M>, values: &[f64]) -> Operand<M::Buffer> {
        kit.put(&self.replace_unused(values.to_vec(), f64::NAN))
    }

    /// Returns an operand for gradients of slots that are added, if the kit accumulates; unused ones have NaN.
    pub(crate) fn gradient<M: Backend>(&self, kit: &Kit<M>, width: usize) -> Operand<M::Buffer> {
        let len = self.routing.slots() * width;
        match kit.base {
            Some(base) => self.put(kit, &vec![base; len]),
            None => kit.result(len),
        }
    }

    /// Returns the values of slots, with `unused` in place of unused ones.
    pub(crate) fn get<M: Backend>(
        &self,
        kit: &Kit<M>,
        operand: &Operand<M::Buffer>,
        unused: f64,
    ) -> Vec<f64> {
        self.replace_unused(kit.get(operand), unused)
    }

    fn replace_unused(&self, mut values: Vec<f64>, with: f64) -> Vec<f64> {
        let width = values.len() / self.routing.slots();
        for (slot, route) in values.chunks_exact_mut(width).zip(&self.route_of_slot) {
            if route.is_none() {
                slot.fill(with);
            }
        }
        values
    }
}

/// The route of every slot. Each source has the same number of slots, of which its routes to the experts here use the
/// first ones, in the order of experts, then of routes.
fn sorted(routing: Routing, routes: &[u32]) -> Vec<Option<usize>> {
    let mut route_of_slot = Vec::new();
    for source in 0..routing.sources() {
        let of_source = source * routing.rows * routing.top..(source + 1) * routing.rows * routing.top;
        let mut here: Vec<usize> =
            of_source.filter(|&route| routing.here().contains(&(routes[route] as usize))).collect();
        here.sort_by_key(|&route| (routes[route], route));
        route_of_slot.extend(here.into_iter().map(Some));
        route_of_slot.resize((source + 1) * routing.rows * routing.slots_per_row(), None);
    }
    route_of_slot
}

/// Mixtures whose experts are cut, of about as many rows: all chunks on one rank, two of four on one of two ranks, and one of
/// four, with fewer experts than a row has routes.
pub(crate) fn cut(rows: usize) -> [Routing; 3] {
    let cut = |chunks: Chunks| {
        let rows = rows.div_ceil(chunks.ranks());
        Routing { rows, experts: 8, top: 3, chunks }
    };
    [Chunks::all(4), Chunks { count: 4, first: 2, here: 2 }, Chunks { count: 4, first: 3, here: 1 }].map(cut)
}
