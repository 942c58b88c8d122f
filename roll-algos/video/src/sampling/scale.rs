//! The scale of classifier-free guidance: one number, or one per expert.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use roll_core::{Error, Result, ScheduleFacts};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};

/// The scale of classifier-free guidance; 1 means no guidance. A configuration gives one number, or `[high, low]` for
/// the two experts, in the order of `model_paths`. Wan's own configurations have the reverse order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GuidanceScale {
    /// Scale of the high-noise expert, or of the only expert.
    pub high: f64,
    /// Scale of the low-noise expert.
    pub low: f64,
}

impl GuidanceScale {
    /// No guidance.
    pub const OFF: Self = Self { high: 1.0, low: 1.0 };

    /// Whether any expert uses guidance.
    pub fn is_on(self) -> bool {
        self != Self::OFF
    }

    /// Fails on numbers below 1, and on two numbers for a model with one expert.
    pub(super) fn check(self, facts: ScheduleFacts) -> Result<()> {
        let invalid = |problem: String| Err(Error::config("guidance_scale", problem));
        for scale in [self.high, self.low] {
            if !(scale.is_finite() && scale >= 1.0) {
                return invalid(format!("must be at least 1, which means no guidance; found {scale}"));
            }
        }
        let has_two_experts = facts.boundary.is_some();
        if self.high != self.low && !has_two_experts {
            return invalid(format!("this model has one expert: give one number instead of {self}"));
        }
        Ok(())
    }
}

impl Default for GuidanceScale {
    fn default() -> Self {
        Self::OFF
    }
}

impl From<f64> for GuidanceScale {
    fn from(scale: f64) -> Self {
        Self { high: scale, low: scale }
    }
}

impl fmt::Display for GuidanceScale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.high == self.low {
            true => write!(f, "{}", self.high),
            false => write!(f, "[{}, {}]", self.high, self.low),
        }
    }
}

impl FromStr for GuidanceScale {
    type Err = String;

    /// Parses `3.5`, or `4,3` for the experts of high and low noise.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let numbers: Option<Vec<f64>> = text.split(',').map(|part| part.trim().parse().ok()).collect();
        match numbers.as_deref() {
            Some([one]) => Ok((*one).into()),
            Some([high, low]) => Ok(Self { high: *high, low: *low }),
            _ => Err(format!("expected {EXPECTED}, found `{text}`")),
        }
    }
}

/// What is expected where a scale is read, in words for error messages.
const EXPECTED: &str = "a number, or two for the experts of high and low noise";

impl JsonSchema for GuidanceScale {
    fn schema_name() -> Cow<'static, str> {
        "GuidanceScale".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let pair = json_schema!({"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2});
        json_schema!({"anyOf": [{"type": "number"}, pair]})
    }
}

impl Serialize for GuidanceScale {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self.high == self.low {
            true => self.high.serialize(serializer),
            false => [self.high, self.low].serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for GuidanceScale {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(ScaleVisitor)
    }
}

struct ScaleVisitor;

impl<'de> Visitor<'de> for ScaleVisitor {
    type Value = GuidanceScale;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(EXPECTED)
    }

    fn visit_f64<E>(self, scale: f64) -> std::result::Result<GuidanceScale, E> {
        Ok(scale.into())
    }

    fn visit_i64<E>(self, scale: i64) -> std::result::Result<GuidanceScale, E> {
        Ok((scale as f64).into())
    }

    fn visit_u64<E>(self, scale: u64) -> std::result::Result<GuidanceScale, E> {
        Ok((scale as f64).into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<GuidanceScale, A::Error> {
        let mut numbers: Vec<f64> = Vec::new();
        while let Some(number) = list.next_element()? {
            numbers.push(number);
        }
        match numbers[..] {
            [high, low] => Ok(GuidanceScale { high, low }),
            _ => Err(serde::de::Error::invalid_length(numbers.len(), &self)),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::SigmaRange;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_scale_is_a_number_or_one_for_each_expert() {
        let read = |json| serde_json::from_value::<GuidanceScale>(json).map_err(|e| e.to_string());
        assert_eq!(read(json!(3.5)).unwrap(), 3.5.into());
        assert_eq!(read(json!(4)).unwrap(), "4".parse().unwrap());
        let two = read(json!([4, 3.0])).unwrap();
        assert_eq!((two.high, two.low), (4.0, 3.0));
        assert_eq!((two, json!(two)), ("4,3".parse().unwrap(), json!([4.0, 3.0])));
        for wrong in [json!("x"), json!([1.0]), json!([1, 2, 3]), json!(null), json!({"high": 4})] {
            let message = read(wrong).unwrap_err();
            assert!(message.contains("two for the experts"), "{message}");
        }
        assert!("4;3".parse::<GuidanceScale>().is_err());
    }

    #[test]
    fn two_numbers_need_two_experts_and_none_is_below_one() {
        let message = |scale: &str, boundary| {
            let facts = ScheduleFacts { shift: 5.0, boundary, trained: SigmaRange::ALL };
            scale.parse::<GuidanceScale>().unwrap().check(facts).map_err(|e| e.to_string())
        };
        message("4,3", Some(0.9)).unwrap();
        message("4,4", None).unwrap();
        assert!(message("4,3", None).unwrap_err().contains("one expert"));
        for scale in ["0.5", "nan", "inf", "-3", "3,0"] {
            assert!(message(scale, Some(0.9)).unwrap_err().contains("at least 1"), "{scale}");
        }
    }
}
