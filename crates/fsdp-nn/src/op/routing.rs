//! Assignment of the rows of a mixture of experts to slots, grouped by expert.

use std::ops::Range;

use crate::cuts::Chunks;

/// The sizes of a routing. On an expert axis, a rank has the rows of all ranks of the axis (its *sources*) and some of the
/// experts; routes to the others have no slot here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Routing {
    /// Number of rows of a source.
    pub rows: usize,
    /// Number of experts of the mixture.
    pub experts: usize,
    /// Routes per row.
    pub top: usize,
    /// How the experts are cut, and which chunks are here.
    pub chunks: Chunks,
}

impl Routing {
    /// Rows of one source, with all experts in one chunk.
    pub const fn whole(rows: usize, experts: usize, top: usize) -> Self {
        Self { rows, experts, top, chunks: Chunks::WHOLE }
    }

    /// Number of sources.
    pub fn sources(&self) -> usize {
        self.chunks.count / self.chunks.here
    }

    /// The experts that are here.
    pub fn here(&self) -> Range<usize> {
        let each = self.experts / self.chunks.count;
        each * self.chunks.first..each * (self.chunks.first + self.chunks.here)
    }

    /// Number of rows of all sources.
    pub fn all_rows(&self) -> usize {
        self.sources() * self.rows
    }

    /// Number of routes of all rows.
    pub fn routes(&self) -> usize {
        self.all_rows() * self.top
    }

    /// The most slots that the routes of a row have.
    pub fn slots_per_row(&self) -> usize {
        self.top.min(self.here().len())
    }

    /// The number of slots. It is that of routes, if all experts are here; otherwise, what routers decide may leave some
    /// unused, with any contents.
    pub fn slots(&self) -> usize {
        self.all_rows() * self.slots_per_row()
    }

    /// Number of slots in use, if every expert has equally many routes.
    pub fn expected_slots(&self) -> usize {
        self.routes() * self.here().len() / self.experts
    }

    /// Number of slots of one expert for the rows of a source, by its number among those here, if every expert has equally
    /// many routes.
    pub(super) fn expected_slots_of(&self, expert: usize) -> usize {
        let routes = self.rows * self.top;
        routes * (expert + 1) / self.experts - routes * expert / self.experts
    }

    /// The slots of one expert, by its number among those here, for the rows of a source: those of
    /// [`places`](Self::places), without assigning the others.
    pub fn slots_of(&self, routes: &[u32], source: usize, expert: usize) -> Range<usize> {
        let (here, per_source) = (self.here(), self.rows * self.top);
        let expert = here.start + expert;
        let of_source = routes[source * per_source..][..per_source].iter().map(|&route| route as usize);
        let begin = source * self.rows * self.slots_per_row();
        let (mut before, mut own) = (0, 0);
        for route in of_source {
            before += usize::from((here.start..expert).contains(&route));
            own += usize::from(route == expert);
        }
        begin + before..begin + before + own
    }

    /// Assigns slots, from the expert of every route (`all_rows x top`).
    ///
    /// # Panics
    /// If a route names an expert that does not exist.
    pub fn places(&self, routes: &[u32]) -> Places {
        let (here, rows) = (self.here(), self.rows);
        let mut places = Places {
            experts: here.len(),
            ranges: Vec::with_capacity(self.sources() * here.len()),
            slot_of_route: vec![None; routes.len()],
            route_of_slot: vec![None; self.slots()],
        };
        for (source, of_source) in routes.chunks(rows * self.top).enumerate() {
            let mut counts = vec![0; self.experts];
            of_source.iter().for_each(|&expert| counts[expert as usize] += 1);
            let mut next = Vec::with_capacity(here.len());
            let mut end = source * rows * self.slots_per_row();
            for count in &counts[here.clone()] {
                next.push(end);
                places.ranges.push(end..end + count);
                end += count;
            }
            for (route, &expert) in of_source.iter().enumerate() {
                let Some(slot) = (expert as usize).checked_sub(here.start).and_then(|at| next.get_mut(at))
                else {
                    continue;
                };
                let route = source * of_source.len() + route;
                (places.slot_of_route[route], places.route_of_slot[*slot]) = (Some(*slot), Some(route));
                *slot += 1;
            }
        }
        places
    }
}

/// The assignment between routes and slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// Number of experts that are here.
    experts: usize,
    /// The slots of each source and expert.
    ranges: Vec<Range<usize>>,
    /// The slot of every route; `None` if its expert is on another rank.
    pub slot_of_route: Vec<Option<usize>>,
    /// The route of every slot; `None` if it is unused.
    pub route_of_slot: Vec<Option<usize>>,
}

impl Places {
    /// Returns the slots of an expert, by its number among those here, for the rows of a source.
    pub fn slots(&self, source: usize, expert: usize) -> Range<usize> {
        self.ranges[source * self.experts + expert].clone()
    }

    /// The slots of every expert, source by source, with the number of the expert among those here.
    pub fn all_slots(&self) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        self.ranges.iter().enumerate().map(|(index, slots)| (index % self.experts, slots.clone()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn slots_are_sorted_by_source_expert_and_route(
            each in 1usize..4, count in 0usize..3, ranks in 0usize..3, rank in 0usize..4, top in 1usize..4,
            rows in 1usize..12, seed: u64,
        ) {
            let (count, ranks) = (1 << count, 1usize << ranks.min(count));
            let (experts, here) = (each * count, count / ranks);
            let chunks = Chunks { count, first: rank % ranks * here, here };
            let routing = Routing { rows, experts, top: top.min(experts), chunks };
            // The experts of a row are different ones.
            let first = |row: u64| (crate::random::uniform(seed, row) * experts as f64) as usize;
            let expert = |row, choice| ((first(row) + choice) % experts) as u32;
            let routes: Vec<u32> = (0..routing.all_rows() as u64)
                .flat_map(|row| (0..routing.top).map(move |choice| expert(row, choice)))
                .collect();
            let places = routing.places(&routes);
            let mut slots = 0;
            for source in 0..ranks {
                let of_source = source * rows * routing.top..(source + 1) * rows * routing.top;
                let mut sorted: Vec<usize> =
                    of_source.filter(|&route| routing.here().contains(&(routes[route] as usize))).collect();
                sorted.sort_by_key(|&route| routes[route]);
                let begin = source * rows * routing.slots_per_row();
                for expert in 0..routing.here().len() {
                    prop_assert_eq!(routing.slots_of(&routes, source, expert), places.slots(source, expert));
                }
                for (slot, &route) in (begin..).zip(&sorted) {
                    prop_assert_eq!(places.slot_of_route[route], Some(slot));
                    prop_assert_eq!(places.route_of_slot[slot], Some(route));
                    let expert = routes[route] as usize - routing.here().start;
                    prop_assert!(places.slots(source, expert).contains(&slot));
                }
                slots += sorted.len();
            }
            prop_assert_eq!(places.slot_of_route.iter().flatten().count(), slots);
            prop_assert_eq!(places.route_of_slot.iter().flatten().count(), slots);
            prop_assert_eq!(places.all_slots().map(|(_, slots)| slots.len()).sum::<usize>(), slots);
        }
    }
}
