use proptest::prelude::*;
use serde_json::Value;

use super::*;

/// A matrix by bitsandbytes (tests/golden/nf4.py).
fn golden() -> Value {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/nf4.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|bits| u32::try_from(bits.as_i64().unwrap() & 0xffff_ffff).unwrap())
        .collect()
}

fn floats(value: &Value) -> Vec<f32> {
    numbers(value).into_iter().map(f32::from_bits).collect()
}

fn bytes(value: &Value) -> Vec<u8> {
    let text = value.as_str().unwrap();
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

fn encode(matrix: Packed, scales: &Scales, values: &[f32]) -> Vec<Vec<u8>> {
    let encode = |(row, values): (usize, &[f32])| {
        let mut bytes = Vec::new();
        matrix.encode(scales, row, values, &mut bytes);
        bytes
    };
    values.chunks(matrix.columns).enumerate().map(encode).collect()
}

#[test]
fn matrix_has_the_bytes_and_elements_of_bitsandbytes() {
    let golden = golden();
    let [rows, columns] = ["rows", "columns"].map(|key| golden[key].as_u64().unwrap() as usize);
    let weight: Vec<f32> = numbers(&golden["weight"]).iter().map(|bits| f32::from_bits(bits << 16)).collect();
    for (format, name) in [(Format::Nf4Single, "single"), (Format::Nf4, "nested")] {
        let (matrix, case) = (Packed { rows, columns, format }, &golden[name]);
        let expected = match format {
            Format::Nf4Single => Scales::Single(floats(&case["absmax"])),
            _ => Scales::Nested(Nested {
                codes: bytes(&case["absmax"]),
                scales: floats(&case["nested_absmax"]),
                offset: f32::from_bits(numbers(&Value::from(vec![case["offset"].clone()]))[0]),
            }),
        };
        assert_eq!(Scales::new(format, format.magnitudes(&weight).collect()), expected, "{name}");
        let encoded = encode(matrix, &expected, &weight);
        let codes: Vec<u8> = encoded.iter().flat_map(|row| &row[..columns / 2]).copied().collect();
        assert_eq!(codes, bytes(&case["codes"]), "{name}");
        for (row, (encoded, sum)) in encoded.iter().zip(case["decoded_bits"].as_array().unwrap()).enumerate()
        {
            let mut joined = Vec::new();
            matrix.join(&expected, row, &encoded[..columns / 2], &mut joined);
            assert_eq!(encoded, &joined);
            let mut decoded = vec![0.0; columns];
            matrix.decode(row, encoded, &mut decoded);
            let bits: u64 = decoded.iter().map(|value| u64::from(value.to_bits())).sum();
            assert_eq!(bits, sum.as_u64().unwrap(), "row {row}, {name}");
        }
    }
}

proptest! {
    #[test]
    fn every_element_is_near_in_every_shape(
        rows in 1usize..40, blocks in prop_oneof![1usize..9, 100usize..300], seed in any::<u64>(),
        format in prop::sample::select(vec![Format::Nf4Single, Format::Nf4, Format::Mxfp4]),
    ) {
        let matrix = Packed { rows, columns: blocks * format.block(), format };
        let mut values = vec![0.0; rows * matrix.columns];
        crate::Init::Normal { std: 0.02 }.fill_f64(seed, "w", 0, &mut values);
        let values: Vec<f32> = values.into_iter().map(|value| value as f32).collect();
        let magnitudes: Vec<f32> = format.magnitudes(&values).collect();
        let encoded = encode(matrix, &Scales::new(format, magnitudes.clone()), &values);
        let spread = magnitudes.iter().copied().fold(0.0, f32::max);
        for (row, bytes) in encoded.iter().enumerate() {
            prop_assert_eq!(bytes.len(), matrix.stored().row_bytes);
            let mut decoded = vec![0.0; matrix.columns];
            matrix.decode(row, bytes, &mut decoded);
            let at = row * matrix.columns;
            for (index, (decoded, value)) in decoded.iter().zip(&values[at..]).enumerate() {
                // Neighbors of the 16 numbers are at most 0.304 apart; codes of nested scales at most 0.015, times the spread.
                // Floats are at most a quarter off: up to 8 become 6.
                let scale = magnitudes[(at + index) / format.block()];
                let far = match format {
                    Format::Nf4 => 0.153 * scale + 0.01 * spread,
                    Format::Nf4Single => 0.153 * scale,
                    Format::Mxfp4 => 0.25 * scale,
                };
                prop_assert!((decoded - value).abs() <= far, "{decoded} for {value}");
            }
        }
    }
}

#[test]
fn not_a_number_stays_visible_in_the_scales() {
    let mut values = vec![0.5; 2 * BLOCK];
    values[3] = f32::NAN;
    values[70] = f32::INFINITY;
    assert!(Format::Nf4.magnitudes(&values).all(|magnitude| !magnitude.is_finite()));
}

/// Each code of each nibble, and the scales that have no room in NF4's: the largest, the smallest and not a number.
#[test]
fn mxfp4_rows_have_floats_times_powers_of_two() {
    let matrix = Packed { rows: 3, columns: 32, format: Format::Mxfp4 };
    assert_eq!(matrix.stored().row_bytes, 17);
    let codes: Vec<u8> = (0..16).map(|code| code | (15 - code) << 4).collect();
    let mut values = vec![0.0; 32];
    for (scale, power) in [(127, 1.0), (130, 8.0), (0, 2f32.powi(-127)), (254, 2f32.powi(127))] {
        matrix.decode(2, &[&codes[..], &[scale]].concat(), &mut values);
        assert_eq!(values[..6], [0.0, -6.0, 0.5, -4.0, 1.0, -3.0].map(|value| value * power));
        assert_eq!(values[30..], [-6.0 * power, 0.0]);
    }
    matrix.decode(0, &[&codes[..], &[255]].concat(), &mut values);
    assert!(values.iter().all(|value| value.is_nan()));
}

/// Every float is encoded as itself, in its block's scale; between two, the nearest is chosen, or the even one.
#[test]
fn mxfp4_encodes_to_the_nearest_float() {
    let matrix = Packed { rows: 1, columns: 32, format: Format::Mxfp4 };
    let mut values: Vec<f32> = matrix.format.values().into_iter().chain([0.0; 16]).collect();
    // Halfway, a little more or less, and beyond the largest.
    values[16..27].copy_from_slice(&[0.25, 0.26, 0.75, 1.25, 1.75, 2.5, -2.51, 3.5, 5.0, -5.1, 7.9]);
    let expected = [0.0, 0.5, 1.0, 1.0, 2.0, 2.0, -3.0, 4.0, 4.0, -6.0, 6.0];
    for factor in [1.0, 2f32.powi(-40), 2f32.powi(90)] {
        let values: Vec<f32> = values.iter().map(|value| value * factor).collect();
        let scales = Scales::new(matrix.format, matrix.format.magnitudes(&values).collect());
        let encoded = encode(matrix, &scales, &values);
        let mut decoded = vec![9.0; 32];
        matrix.decode(0, &encoded[0], &mut decoded);
        assert_eq!(decoded[..16], values[..16]);
        assert_eq!(decoded[16..27], expected.map(|value| value * factor));
    }
}
