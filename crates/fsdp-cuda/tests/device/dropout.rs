//! Checks that dropout factors match the host's masks, for any part of a sample.

use fsdp_nn::backend::Dropout;
use fsdp_nn::random;

use crate::subject::subject;
use crate::values::*;

#[test]
fn dropout_factors_match_random_words_from_any_offset() {
    let keys = [5, u64::MAX - 3, 5];
    let runs = Dropout { p: 0.5, keys: &keys };
    for dtype in FLOATS {
        for (firsts, run_len) in
            [([0, 1, 2], 1), ([4, 0, 1 << 40], 36), ([7, 1001, 3], 1001), ([3, 2, 8], 64)]
        {
            let memory = subject();
            let got = values(&*memory, &memory.dropout_factors(runs, &firsts, dtype, run_len).unwrap());
            let mut words = vec![0; run_len];
            let expected: Vec<f64> = (keys.iter().zip(firsts))
                .flat_map(|(&key, first)| {
                    random::words(key, first, &mut words);
                    words
                        .iter()
                        .map(|&word| if word < runs.threshold() { 0.0 } else { 2.0 })
                        .collect::<Vec<_>>()
                })
                .collect();
            assert_bits(&got, &expected, &format!("{run_len} from {firsts:?} x {dtype}"));
        }
    }
}
