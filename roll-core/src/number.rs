//! Numbers in JSON, also those that are not finite: these are written as the texts `NaN`, `inf` and `-inf`.
//!
//! The attribute `#[serde(with = "number")]` of a field selects this form. The field's type is f64, or made of f64 by
//! options, lists and maps.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{DeserializeOwned, Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A number, or a collection of numbers.
pub trait Numbers: Sized {
    /// The same collection, with [`AnyNumber`] in place of each f64.
    type Written: Serialize + DeserializeOwned;

    /// Converts to the type that is written.
    fn written(&self) -> Self::Written;

    /// Converts back.
    fn read(written: Self::Written) -> Self;
}

/// Writes numbers, for `#[serde(with = "number")]`.
pub fn serialize<N: Numbers, S: Serializer>(numbers: &N, serializer: S) -> Result<S::Ok, S::Error> {
    numbers.written().serialize(serializer)
}

/// Reads numbers, for `#[serde(with = "number")]`.
pub fn deserialize<'de, N: Numbers, D: Deserializer<'de>>(deserializer: D) -> Result<N, D::Error> {
    N::Written::deserialize(deserializer).map(N::read)
}

/// A number that need not be finite.
pub struct AnyNumber(f64);

impl Numbers for f64 {
    type Written = AnyNumber;
    fn written(&self) -> AnyNumber {
        AnyNumber(*self)
    }
    fn read(written: AnyNumber) -> Self {
        written.0
    }
}

impl<N: Numbers> Numbers for Option<N> {
    type Written = Option<N::Written>;
    fn written(&self) -> Self::Written {
        self.as_ref().map(N::written)
    }
    fn read(written: Self::Written) -> Self {
        written.map(N::read)
    }
}

impl<N: Numbers> Numbers for Vec<N> {
    type Written = Vec<N::Written>;
    fn written(&self) -> Self::Written {
        self.iter().map(N::written).collect()
    }
    fn read(written: Self::Written) -> Self {
        written.into_iter().map(N::read).collect()
    }
}

impl<N: Numbers> Numbers for [N; 2] {
    type Written = [N::Written; 2];
    fn written(&self) -> Self::Written {
        self.each_ref().map(N::written)
    }
    fn read(written: Self::Written) -> Self {
        written.map(N::read)
    }
}

impl<N: Numbers> Numbers for BTreeMap<String, N> {
    type Written = BTreeMap<String, N::Written>;
    fn written(&self) -> Self::Written {
        self.iter().map(|(name, number)| (name.clone(), number.written())).collect()
    }
    fn read(written: Self::Written) -> Self {
        written.into_iter().map(|(name, number)| (name, N::read(number))).collect()
    }
}

impl Serialize for AnyNumber {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_finite() {
            serializer.serialize_f64(self.0)
        } else {
            serializer.serialize_str(&self.0.to_string())
        }
    }
}

impl<'de> Deserialize<'de> for AnyNumber {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;

        impl Visitor<'_> for Reader {
            type Value = AnyNumber;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number, `NaN`, `inf` or `-inf`")
            }
            fn visit_f64<E>(self, number: f64) -> Result<AnyNumber, E> {
                Ok(AnyNumber(number))
            }
            fn visit_i64<E>(self, number: i64) -> Result<AnyNumber, E> {
                Ok(AnyNumber(number as f64))
            }
            fn visit_u64<E>(self, number: u64) -> Result<AnyNumber, E> {
                Ok(AnyNumber(number as f64))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<AnyNumber, E> {
                let named = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY].into_iter().find(|n| n.to_string() == text);
                named.map(AnyNumber).ok_or_else(|| E::invalid_value(serde::de::Unexpected::Str(text), &self))
            }
        }

        deserializer.deserialize_any(Reader)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize, Deserialize)]
    struct Metrics(#[serde(with = "super")] BTreeMap<String, Vec<Option<f64>>>);

    #[test]
    fn facts_keep_numbers_that_are_not_finite() {
        let [nan, infinite] = [f64::NAN, f64::INFINITY];
        let optimizer =
            crate::OptimizerConfig { betas: [nan, infinite], max_grad_norm: infinite, ..Default::default() };
        let sampling = crate::Sampling { temperature: nan, top_p: infinite, ..crate::Sampling::greedy(1) };
        let schedule = crate::ScheduleFacts { shift: 1.0, boundary: Some(nan), trained: crate::SigmaRange::ALL };
        fn back<T: Serialize + DeserializeOwned>(value: &T) -> T {
            serde_json::from_str(&serde_json::to_string(value).unwrap()).unwrap()
        }
        let read = back(&optimizer);
        assert!(read.betas[0].is_nan() && [read.betas[1], read.max_grad_norm] == [infinite; 2] && read.eps == 1e-8);
        let read = back(&sampling);
        assert!(read.temperature.is_nan() && read.top_p == infinite);
        assert!(back(&schedule).boundary.is_some_and(f64::is_nan));
        assert!(back(&crate::Timestep(nan)).0.is_nan());
    }

    #[test]
    fn every_number_keeps_its_bits() {
        let numbers = [0.1, -0.0, f64::MIN_POSITIVE / 3.0, 1e300, f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
        let all: Vec<_> = numbers.into_iter().map(Some).chain([None]).collect();
        let text = serde_json::to_string(&Metrics([("a".to_string(), all)].into())).unwrap();
        let back = serde_json::from_str::<Metrics>(&text).unwrap().0.remove("a").unwrap();
        let bits = |n: Option<f64>| n.map(f64::to_bits);
        assert!(back.iter().copied().map(bits).eq(numbers.into_iter().map(|n| bits(Some(n))).chain([None])), "{text}");
        let whole = serde_json::from_str::<Metrics>(r#"{"a": [3, -2]}"#).unwrap().0;
        assert_eq!(whole["a"], [Some(3.0), Some(-2.0)]);
        let error = serde_json::from_str::<Metrics>(r#"{"a": ["much"]}"#).err().unwrap().to_string();
        assert!(error.contains("`NaN`") && error.contains("much"), "{error}");
    }
}
