//! Assignment of the rows of a mixture of experts to slots, grouped by expert.

use std::ops::Range;

/// The sizes of a routing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Routing {
    /// Number of rows.
    pub rows: usize,
    /// Number of experts.
    pub experts: usize,
    /// Routes per row.
    pub top: usize,
}

impl Routing {
    /// The number of routes, and of slots.
    pub fn slots(&self) -> usize {
        self.rows * self.top
    }

    /// Assigns slots, from the expert of every route (`rows x top`).
    ///
    /// # Panics
    /// If a route names an expert that does not exist.
    pub fn places(&self, routes: &[u32]) -> Places {
        let mut starts = vec![0; self.experts + 1];
        routes.iter().for_each(|&expert| starts[expert as usize + 1] += 1);
        for expert in 0..self.experts {
            starts[expert + 1] += starts[expert];
        }
        let mut next = starts.clone();
        let (mut slot_of_route, mut route_of_slot) = (vec![0; routes.len()], vec![0; routes.len()]);
        for (route, &expert) in routes.iter().enumerate() {
            let slot = &mut next[expert as usize];
            (slot_of_route[route], route_of_slot[*slot]) = (*slot, route);
            *slot += 1;
        }
        Places { starts, slot_of_route, route_of_slot }
    }
}

/// The assignment between routes and slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// The first slot of each expert, and the total number of slots.
    pub starts: Vec<usize>,
    /// The slot of every route.
    pub slot_of_route: Vec<usize>,
    /// The route of every slot.
    pub route_of_slot: Vec<usize>,
}

impl Places {
    /// Returns the slots of an expert.
    pub fn slots(&self, expert: usize) -> Range<usize> {
        self.starts[expert]..self.starts[expert + 1]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn slots_are_sorted_by_expert_then_route(
            experts in 1usize..6, top in 1usize..4, rows in 0usize..20, seed: u64,
        ) {
            let routing = Routing { rows, experts, top };
            let routes: Vec<u32> = (0..routing.slots() as u64)
                .map(|route| (crate::random::uniform(seed, route) * experts as f64) as u32)
                .collect();
            let places = routing.places(&routes);
            let mut sorted: Vec<usize> = (0..routes.len()).collect();
            sorted.sort_by_key(|&route| routes[route]);
            prop_assert_eq!(&places.route_of_slot, &sorted);
            for (slot, &route) in sorted.iter().enumerate() {
                prop_assert_eq!(places.slot_of_route[route], slot);
                let expert = routes[route] as usize;
                prop_assert!((places.starts[expert]..places.starts[expert + 1]).contains(&slot));
            }
        }
    }
}
