//! The date that templates ask for.

use std::time::{SystemTime, UNIX_EPOCH};

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// The present date and time (UTC) as Python's `strftime` writes it with `format`. `fixed`, a date as `2026-11-28`,
/// takes its place. Fails on a directive that is not known.
pub(super) fn strftime(format: &str, fixed: Option<&str>) -> Result<String, String> {
    let seconds = match fixed {
        Some(date) => parse(date).ok_or_else(|| format!("expected a date as 2026-11-28, found `{date}`"))? * 86_400,
        None => SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |passed| passed.as_secs() as i64),
    };
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    let weekday = DAYS[(days + 4).rem_euclid(7) as usize];
    let month_name = MONTHS[month as usize - 1];
    let twelve = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(c) = letters.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = letters.next();
        let pads = directive != Some('-');
        if !pads {
            directive = letters.next();
        }
        let two = |number: i64| if pads { format!("{number:02}") } else { number.to_string() };
        out += &match directive {
            Some('Y') => year.to_string(),
            Some('y') => two(year % 100),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('e') => format!("{day:2}"),
            Some('H') => two(hour),
            Some('I') => two(twelve),
            Some('M') => two(minute),
            Some('S') => two(second % 60),
            Some('j') => format!("{:03}", days - from_civil(year, 1, 1) + 1),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.into(),
            Some('A') => weekday.into(),
            Some('a') => weekday[..3].into(),
            Some('B') => month_name.into(),
            Some('b' | 'h') => month_name[..3].into(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{:02}", second % 60),
            Some('Z' | 'z') => String::new(),
            Some('%') => "%".into(),
            other => {
                return Err(format!("strftime_now: `%{}` is not known", other.map(String::from).unwrap_or_default()));
            }
        };
    }
    Ok(out)
}

fn parse(date: &str) -> Option<i64> {
    let mut parts = date.split('-').map(|part| part.parse::<i64>().ok());
    let (year, month, day) = (parts.next()??, parts.next()??, parts.next()??);
    let days = from_civil(year, month, day);
    (parts.next().is_none() && (1..=9999).contains(&year) && civil(days) == (year, month, day)).then_some(days)
}

/// Days since 1970 of a date of the Gregorian calendar. Years are counted from March, so that leap days end them.
fn from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    year * 365 + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400) + of_year - 719_468
}

fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let (day, month) = (of_year - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    (year + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::strftime;

    #[test]
    fn dates_are_written_as_python_writes_them() {
        let all = "%Y-%m-%d %y %e %-d %B %b %A %a %j %H:%M:%S %I %p %%";
        let expected = "2026-03-01 26  1 1 March Mar Sunday Sun 060 00:00:00 12 AM %";
        assert_eq!(strftime(all, Some("2026-03-01")).as_deref(), Ok(expected));
        assert_eq!(strftime("%A %j", Some("2024-12-31")).as_deref(), Ok("Tuesday 366"));
        assert!(strftime("%Q", None).is_err_and(|problem| problem.contains("%Q")));
        assert!(strftime("%Y", Some("2026-02-30")).is_err_and(|problem| problem.contains("2026-02-30")));
        assert!(strftime("%Y", None).is_ok_and(|year| year.as_str() >= "2026"));
    }
}
