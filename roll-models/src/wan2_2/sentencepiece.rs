//! `spiece.model`, the sentencepiece form of T5's tokenizer: a protobuf message (`sentencepiece_model.proto`), of which
//! pieces, their scores and the normalizer's table are read.

use tokenizers::models::unigram::Unigram;
use tokenizers::normalizers::replace::ReplacePattern;
use tokenizers::normalizers::{NormalizerWrapper, Precompiled, Replace, Sequence, Strip};
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::{AddedToken, Tokenizer};

/// Kinds of pieces.
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

/// `model_type` of a unigram model, the default of the format too.
const UNIGRAM: u64 = 1;

/// The tokenizer that `bytes` hold, built as transformers builds a `tokenizer.json` from them. Fails, in words, on any
/// other than a unigram model.
pub(super) fn tokenizer(bytes: &[u8]) -> Result<Tokenizer, String> {
    let (mut pieces, mut charsmap, mut byte_fallback): (Vec<Piece>, &[u8], bool) = (Vec::new(), &[], false);
    for field in Fields(bytes) {
        match field? {
            (1, Value::Bytes(piece)) => pieces.push(Piece::read(piece)?),
            (2, Value::Bytes(trainer)) => {
                for field in Fields(trainer) {
                    match field? {
                        (3, Value::Number(UNIGRAM)) => {}
                        (3, Value::Number(other)) => {
                            return Err(format!("expected a unigram model (1), found one of type {other}"));
                        }
                        (35, Value::Number(on)) => byte_fallback = on != 0,
                        _ => {}
                    }
                }
            }
            (3, Value::Bytes(normalizer)) => {
                for field in Fields(normalizer) {
                    if let (2, Value::Bytes(table)) = field? {
                        charsmap = table;
                    }
                }
            }
            _ => {}
        }
    }
    let unknown = pieces.iter().position(|piece| piece.kind == UNKNOWN);
    let vocabulary = pieces.iter().map(|piece| (piece.text.clone(), f64::from(piece.score))).collect();
    let failed = |e: tokenizers::Error| e.to_string();
    let model = Unigram::from(vocabulary, unknown, byte_fallback).map_err(|e| e.to_string())?;
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_normalizer(Some(normalizer(charsmap)?)).map_err(failed)?;
    tokenizer.with_pre_tokenizer(Some(Metaspace::new('▁', PrependScheme::Always, true)));
    let added = |piece: &Piece| AddedToken::from(piece.text.clone(), piece.kind != USER_DEFINED).normalized(false);
    let special = pieces.iter().filter(|piece| matches!(piece.kind, UNKNOWN | CONTROL | USER_DEFINED));
    tokenizer.add_tokens(special.map(added)).map_err(failed)?;
    Ok(tokenizer)
}

fn normalizer(charsmap: &[u8]) -> Result<Sequence, String> {
    let spaces = Replace::new(ReplacePattern::Regex(" {2,}".into()), "▁").map_err(|e| e.to_string())?;
    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    if !charsmap.is_empty() {
        let table = Precompiled::from(charsmap).map_err(|e| format!("the table of the normalizer: {e:?}"))?;
        steps.push(table.into());
    }
    steps.extend([Strip::new(false, true).into(), spaces.into()]);
    Ok(Sequence::new(steps))
}

struct Piece {
    text: String,
    score: f32,
    kind: u64,
}

impl Piece {
    fn read(bytes: &[u8]) -> Result<Self, String> {
        let mut piece = Self { text: String::new(), score: 0.0, kind: 1 };
        for field in Fields(bytes) {
            match field? {
                (1, Value::Bytes(text)) => {
                    piece.text = String::from_utf8(text.to_vec()).map_err(|_| "a piece is no UTF-8".to_string())?;
                }
                (2, Value::Word(bits)) => piece.score = f32::from_bits(bits),
                (3, Value::Number(kind)) => piece.kind = kind,
                _ => {}
            }
        }
        match piece.score.is_finite() {
            true => Ok(piece),
            false => Err(format!("the score of the piece `{}` is {}", piece.text, piece.score)),
        }
    }
}

/// The fields of a message: numbers and values.
struct Fields<'a>(&'a [u8]);

enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    Word(u32),
    Other,
}

impl<'a> Fields<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or("it ends in the middle of a field")?;
        self.0 = rest;
        Ok(taken)
    }

    fn number(&mut self) -> Result<u64, String> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = u64::from(self.take(1)?[0]);
            value |= (byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err("a number has more than 64 bits".into())
    }

    fn field(&mut self) -> Result<(u64, Value<'a>), String> {
        let tag = self.number()?;
        let value = match tag & 7 {
            0 => Value::Number(self.number()?),
            1 => {
                self.take(8)?;
                Value::Other
            }
            2 => {
                let length = usize::try_from(self.number()?).map_err(|_| "a field of senseless length".to_string())?;
                Value::Bytes(self.take(length)?)
            }
            5 => {
                let mut word = [0; 4];
                word.copy_from_slice(self.take(4)?);
                Value::Word(u32::from_le_bytes(word))
            }
            other => return Err(format!("a field of the unknown type {other}")),
        };
        Ok((tag >> 3, value))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Value<'a>), String>;
    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.0 = &[]; // nothing behind it makes sense
        }
        Some(field)
    }
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn number(mut value: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        while value >= 0x80 {
            bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        bytes.push(value as u8);
        bytes
    }

    fn bytes_field(field: u64, bytes: &[u8]) -> Vec<u8> {
        [number(field << 3 | 2), number(bytes.len() as u64), bytes.to_vec()].concat()
    }

    fn number_field(field: u64, value: u64) -> Vec<u8> {
        [number(field << 3), number(value)].concat()
    }

    /// A model of these pieces, with fields that this reader does not know among them.
    pub(in super::super) fn model(pieces: &[(String, f64)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (text, score) in pieces {
            let kind = match text.as_str() {
                "<unk>" => UNKNOWN,
                "<pad>" | "</s>" => CONTROL,
                _ if text.starts_with("<0x") => 6,
                _ => 1,
            };
            let score = [number(2 << 3 | 5), (*score as f32).to_le_bytes().to_vec()].concat();
            let piece = [bytes_field(1, text.as_bytes()), score, number_field(3, kind)].concat();
            bytes.extend(bytes_field(1, &piece));
        }
        let trainer = [number_field(3, UNIGRAM), number_field(4, 8000), number_field(35, 1)].concat();
        bytes.extend(bytes_field(2, &trainer));
        bytes.extend(bytes_field(3, &[bytes_field(1, b"identity"), number_field(3, 1)].concat()));
        bytes
    }

    #[test]
    fn what_is_cut_or_no_unigram_model_is_an_error_in_words() {
        let pieces = [("<unk>".to_string(), 0.0), ("▁a".to_string(), -1.0)];
        let whole = model(&pieces);
        tokenizer(&whole).unwrap();
        for end in 1..whole.len() {
            let _ = tokenizer(&whole[..end]);
        }
        let said = |bytes: &[u8]| tokenizer(bytes).err().unwrap();
        assert!(said(&whole[..whole.len() - 1]).contains("in the middle"));
        assert!(said(&bytes_field(2, &number_field(3, 2))).contains("unigram"));
        assert!(said(&[0xff; 12]).contains("64 bits"));
        let infinite = [("▁a".to_string(), f64::INFINITY)];
        assert!(said(&model(&infinite)).contains("score"));
    }
}
