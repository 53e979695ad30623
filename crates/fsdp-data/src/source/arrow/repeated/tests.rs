use std::sync::Arc;

use arrow_array::types::Int32Type;
use arrow_array::{
    DictionaryArray, Int32Array, LargeStringArray, ListArray, NullArray, StringArray, StringViewArray,
};
use arrow_buffer::OffsetBuffer;
use arrow_schema::Field;
use proptest::prelude::*;

use super::super::super::shape::Shape;
use super::super::values::record;
use super::*;
use crate::record::Record;

fn dictionary(keys: Vec<Option<i32>>, values: Vec<&str>) -> ArrayRef {
    let (keys, values) = (Int32Array::from(keys), Arc::new(StringArray::from(values)));
    Arc::new(DictionaryArray::<Int32Type>::new(keys, values))
}

fn lists(items: ArrayRef, lens: Vec<usize>) -> ArrayRef {
    let field = Arc::new(Field::new("item", items.data_type().clone(), true));
    Arc::new(ListArray::new(field, OffsetBuffer::from_lengths(lens), items, None))
}

fn measured(array: &ArrayRef) -> Result<u64, (usize, String)> {
    bytes(&[("a".to_owned(), Arc::clone(array))], array.len(), 1 << 30)
}

proptest! {
    #[test]
    fn texts_are_measured_like_they_are_read(
        keys in proptest::collection::vec(proptest::option::of(0..3_i32), 0..40), split in 0..40_usize
    ) {
        let values = ["", "ab", "cdefgh"];
        let split = split.min(keys.len());
        let nested = lists(dictionary(keys.clone(), values.to_vec()), vec![split, keys.len() - split]);
        let texts: Vec<Option<&str>> = keys.iter().map(|key| key.map(|key| values[key as usize])).collect();
        let viewed: ArrayRef = Arc::new(StringViewArray::from(texts.clone()));
        let expected: usize = texts.iter().flatten().map(|text| text.len()).sum();
        for array in [dictionary(keys, values.to_vec()), nested, viewed] {
            let columns = [("a".to_owned(), Arc::clone(&array))];
            let text_bytes = |row| match record(&columns, &[Shape::Json], row).unwrap() {
                Record::Text(text) => text.len(),
                Record::Object(fields) => {
                    let items = fields["a"].as_array().cloned().unwrap_or_default();
                    items.iter().filter_map(|item| item.as_str()).map(str::len).sum()
                }
                Record::Tokens(_) => 0,
            };
            prop_assert_eq!((0..array.len()).map(text_bytes).sum::<usize>(), expected);
            prop_assert_eq!(measured(&array).unwrap(), expected as u64);
        }
    }
}

#[test]
fn row_of_copies_or_nulls_is_refused_before_it_is_read() {
    let long = "x".repeat(1 << 20);
    let copies = dictionary(vec![Some(0); 1026], vec![&long]);
    let (row, fault) = measured(&lists(Arc::clone(&copies), vec![1, 1025])).unwrap_err();
    assert!(row == 1 && fault.contains("column \"a\" expands to more than"), "{row} {fault}");
    assert_eq!(measured(&lists(copies, vec![2, 1024])).unwrap(), 1026 << 20);
    let nulls: ArrayRef = Arc::new(NullArray::new(1 << 40));
    assert_eq!(measured(&lists(nulls.slice(0, 1 << 30), vec![5, (1 << 30) - 5])).unwrap_err().0, 1);
    // Rows without bytes may be without number.
    assert_eq!(measured(&nulls).unwrap(), 0);
}

#[test]
fn values_that_cannot_repeat_are_not_measured() {
    let plain: [ArrayRef; 3] = [
        Arc::new(StringArray::from(vec!["a"; 9])),
        Arc::new(LargeStringArray::from(vec!["a"; 9])),
        lists(Arc::new(StringArray::from(vec!["a"; 9])), vec![4, 5]),
    ];
    plain.iter().for_each(|array| assert_eq!(measured(array).unwrap(), 0, "{array:?}"));
}
