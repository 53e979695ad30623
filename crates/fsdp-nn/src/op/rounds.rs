//! Rows that are sent only to the ranks of their experts, in rounds of a fixed size.
//!
//! All ranks of the expert axis know the routes of all rows, so they agree on the rounds without asking. Each rank cuts its
//! rows into blocks, so that no rank gets more rows of a block than fit into a round. Round `i` moves block `i` of every rank;
//! all parts of the sum of a row therefore come back in one round.

use std::ops::Range;

use super::routing::Routing;

/// Rounds that move the rows of a mixture to the ranks of their experts, or back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounds {
    /// The rows and their experts.
    pub routing: Routing,
    /// Elements of a row.
    pub width: usize,
}

/// The rows of every rank that a round moves.
pub(crate) type Round = Vec<Range<usize>>;

impl Rounds {
    /// Number of rounds that prices assume: between ranks of which one has half more rows for another one than the mean.
    pub const EXPECTED: usize = 3;

    /// Whether fewer rows are moved than by gathering the rows of all ranks, in as many rounds as are expected.
    pub(super) fn pay(&self) -> bool {
        self.ranks() > 1 && Self::EXPECTED * self.capacity() < self.routing.rows
    }

    /// Number of ranks of the axis.
    pub fn ranks(&self) -> usize {
        self.routing.chunks.ranks()
    }

    /// The most rows that a rank sends to one rank in a round: half of those that it has for each, if all have equally many.
    pub fn capacity(&self) -> usize {
        (self.routing.rows * self.routing.top).div_ceil(2 * self.ranks())
    }

    /// Elements that a rank sends in a round, those to itself included.
    pub fn sent(&self) -> usize {
        self.ranks() * self.capacity() * self.width
    }

    /// The most rounds that any routes need.
    pub fn most(&self) -> usize {
        self.routing.rows.div_ceil(self.capacity())
    }

    /// The most indexes of rows that are needed at once.
    pub(super) fn ids(&self) -> usize {
        self.ranks() * self.capacity().max(self.routing.rows)
    }

    /// The index of this rank.
    pub(crate) fn here(&self) -> usize {
        self.routing.chunks.first / self.routing.chunks.here
    }

    /// The blocks of each round, from the experts of all routes.
    pub(crate) fn blocks(&self, routes: &[u32]) -> Vec<Round> {
        let blocks: Vec<Vec<Range<usize>>> =
            (0..self.ranks()).map(|source| self.blocks_of(routes, source)).collect();
        let rounds = blocks.iter().map(Vec::len).max().unwrap_or(0);
        let round = |round: usize| {
            let block = |blocks: &Vec<Range<usize>>| blocks.get(round).cloned().unwrap_or(0..0);
            blocks.iter().map(block).collect()
        };
        (0..rounds).map(round).collect()
    }

    fn blocks_of(&self, routes: &[u32], source: usize) -> Vec<Range<usize>> {
        let (mut blocks, mut first, mut counts) = (Vec::new(), 0, vec![0; self.ranks()]);
        for row in 0..self.routing.rows {
            let targets = self.targets(routes, source, row);
            if targets.clone().any(|rank| counts[rank] == self.capacity()) {
                blocks.push(first..row);
                first = row;
                counts.fill(0);
            }
            targets.for_each(|rank| counts[rank] += 1);
        }
        blocks.push(first..self.routing.rows);
        blocks
    }

    /// The ranks that have experts of a row, each once.
    fn targets<'a>(
        &self,
        routes: &'a [u32],
        source: usize,
        row: usize,
    ) -> impl Iterator<Item = usize> + Clone + use<'a> {
        let Routing { rows, top, experts, .. } = self.routing;
        let each = experts / self.ranks();
        let routes = &routes[(source * rows + row) * top..][..top];
        let rank = move |index: usize| routes[index] as usize / each;
        (0..top).filter(move |&index| (0..index).all(|other| rank(other) != rank(index))).map(rank)
    }

    /// For each row of a source's block, its place among those that go to a rank, if it does.
    fn places(&self, routes: &[u32], source: usize, block: Range<usize>, rank: usize) -> Vec<Option<usize>> {
        let mut next = 0;
        let mut place = |row: usize| {
            let is_sent = self.targets(routes, source, row).any(|target| target == rank);
            next += usize::from(is_sent);
            is_sent.then(|| next - 1)
        };
        block.map(&mut place).collect()
    }

    /// The rows that this rank sends in a round, among its own; for places that are not used, the index after the last row.
    pub(crate) fn sent_rows(&self, routes: &[u32], round: &Round) -> Vec<u32> {
        let (here, rows) = (self.here(), self.routing.rows);
        self.packed(rows, |rank| {
            (round[here].clone(), self.places(routes, here, round[here].clone(), rank), 0)
        })
    }

    /// As [`sent_rows`](Self::sent_rows), of the sums that are sent back, among the rows of all ranks.
    pub(crate) fn returned_rows(&self, routes: &[u32], round: &Round) -> Vec<u32> {
        let (here, rows) = (self.here(), self.routing.rows);
        let of_source = |source: usize| {
            let block = round[source].clone();
            (block.clone(), self.places(routes, source, block, here), source * rows)
        };
        self.packed(self.ranks() * rows, of_source)
    }

    /// The row in each place of what is sent: for every rank those of a block, after some other rows.
    fn packed(
        &self,
        unused: usize,
        rows: impl Fn(usize) -> (Range<usize>, Vec<Option<usize>>, usize),
    ) -> Vec<u32> {
        let mut ids = vec![unused as u32; self.ranks() * self.capacity()];
        for (rank, ids) in ids.chunks_mut(self.capacity()).enumerate() {
            let (block, places, before) = rows(rank);
            for (row, place) in block.zip(places) {
                place.into_iter().for_each(|place| ids[place] = (before + row) as u32);
            }
        }
        ids
    }

    /// For each row of a source's block, where it is in what this rank received; otherwise, the index after the last row.
    pub(crate) fn received_rows(&self, routes: &[u32], round: &Round, source: usize) -> Vec<u32> {
        let places = self.places(routes, source, round[source].clone(), self.here());
        places.into_iter().map(|place| self.received(source, place)).collect()
    }

    /// For each row of this rank's block, where its parts are in what this rank received: one of every rank, as
    /// [`received_rows`](Self::received_rows).
    pub(crate) fn received_parts(&self, routes: &[u32], round: &Round) -> Vec<u32> {
        let block = &round[self.here()];
        let places: Vec<Vec<Option<usize>>> =
            (0..self.ranks()).map(|rank| self.places(routes, self.here(), block.clone(), rank)).collect();
        let of_row = |row: usize| {
            places.iter().enumerate().map(move |(rank, places)| self.received(rank, places[row]))
        };
        (0..block.len()).flat_map(of_row).collect()
    }

    fn received(&self, rank: usize, place: Option<usize>) -> u32 {
        let capacity = self.capacity();
        place.map_or(self.ranks() * capacity, |place| rank * capacity + place) as u32
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cuts::Chunks;

    /// Rows of a table by index, where the index after the last row is a zero.
    fn pick(ids: &[u32], table: &[u64]) -> Vec<u64> {
        ids.iter().map(|&id| table.get(id as usize).copied().unwrap_or(0)).collect()
    }

    /// What each rank receives: part `r` of what rank `s` sends is part `s` of what rank `r` receives.
    fn all_to_all(sent: &[Vec<u64>], capacity: usize) -> Vec<Vec<u64>> {
        let part = |to: usize| sent.iter().flat_map(move |sent| sent[to * capacity..][..capacity].to_vec());
        (0..sent.len()).map(|to| part(to).collect()).collect()
    }

    proptest! {
        #[test]
        fn rows_reach_the_ranks_of_their_experts_and_their_sums_come_back(
            ranks in 0u32..4, each in 1usize..4, rows in 1usize..20, top in 1usize..5, hot in 0.0f64..1.0, seed: u64,
        ) {
            let ranks = 1 << ranks;
            let experts = ranks * each;
            let top = top.min(experts);
            let of_rank = |first| {
                let chunks = Chunks { count: ranks, first, here: 1 };
                Rounds { routing: Routing { rows, experts, top, chunks }, width: 1 }
            };
            // Some rows have the first experts.
            let first = |row: u64| {
                let random = crate::random::uniform(seed, row);
                if random < hot { 0 } else { (crate::random::uniform(seed + 1, row) * experts as f64) as usize }
            };
            let expert = |row, choice| ((first(row) + choice) % experts) as u32;
            let routes: Vec<u32> = (0..(ranks * rows) as u64)
                .flat_map(|row| (0..top).map(move |choice| expert(row, choice)))
                .collect();
            let goes = |row: usize, rank: usize| {
                routes[row * top..][..top].iter().any(|&expert| expert as usize / each == rank)
            };
            let rounds = of_rank(0).blocks(&routes);
            prop_assert!((1..=of_rank(0).most()).contains(&rounds.len()));
            let capacity = of_rank(0).capacity();
            let (mut arrived, mut sums) = (vec![vec![0; ranks * rows]; ranks], vec![vec![0; rows]; ranks]);
            for round in &rounds {
                // Row `i` of all rows is `i + 1`; a rank returns it times a number of its own.
                let mine = |rank: usize| -> Vec<u64> { (0..rows).map(|row| (rank * rows + row + 1) as u64).collect() };
                let sent: Vec<_> = (0..ranks).map(|rank| pick(&of_rank(rank).sent_rows(&routes, round), &mine(rank))).collect();
                let received = all_to_all(&sent, capacity);
                for (rank, arrived) in arrived.iter_mut().enumerate() {
                    for source in 0..ranks {
                        let found = pick(&of_rank(rank).received_rows(&routes, round, source), &received[rank]);
                        arrived[source * rows..][round[source].clone()].copy_from_slice(&found);
                    }
                }
                let parts = |rank: usize| arrived[rank].iter().map(|x| x * 10u64.pow(rank as u32)).collect::<Vec<_>>();
                let returned: Vec<_> = (0..ranks)
                    .map(|rank| pick(&of_rank(rank).returned_rows(&routes, round), &parts(rank)))
                    .collect();
                let received = all_to_all(&returned, capacity);
                for (rank, sums) in sums.iter_mut().enumerate() {
                    let found = pick(&of_rank(rank).received_parts(&routes, round), &received[rank]);
                    let of_block = found.chunks(ranks).map(|parts| parts.iter().sum::<u64>());
                    sums[round[rank].clone()].iter_mut().zip(of_block).for_each(|(sum, found)| *sum = found);
                }
            }
            for row in 0..ranks * rows {
                for (rank, arrived) in arrived.iter().enumerate() {
                    prop_assert_eq!(arrived[row], if goes(row, rank) { row as u64 + 1 } else { 0 });
                }
                let parts = (0..ranks).filter(|&rank| goes(row, rank)).map(|rank| 10u64.pow(rank as u32));
                prop_assert_eq!(sums[row / rows][row % rows], (row as u64 + 1) * parts.sum::<u64>());
            }
        }
    }
}
