package main

import (
	"fmt"
	"io"
	"slices"
	"time"
)

// sample is a set of measured durations.
type sample []time.Duration

// measure runs f n times and keeps how long each took.
func measure(n int, f func() error) (sample, error) {
	s := make(sample, 0, n)
	for range n {
		start := time.Now()
		if err := f(); err != nil {
			return nil, err
		}
		s = append(s, time.Since(start))
	}
	return s, nil
}

// percentile returns the nearest-rank percentile, in milliseconds.
func (s sample) percentile(p int) float64 {
	sorted := slices.Sorted(slices.Values(s))
	rank := (len(sorted)*p + 99) / 100
	return float64(sorted[max(rank, 1)-1].Microseconds()) / 1000
}

// minus returns the differences from a sample that was measured in turn with this one, and is as
// large.
func (s sample) minus(t sample) sample {
	out := make(sample, len(s))
	for i := range out {
		out[i] = s[i] - t[i]
	}
	return out
}

// report prints figures, one a line, in the form that docs/measurements and
// scripts read.
type report struct{ out io.Writer }

func (r report) figure(name string, value float64) {
	fmt.Fprintf(r.out, "bench: %s %.3g\n", name, value)
}

func (r report) percentiles(name string, s sample) {
	r.figure(name+"_p50_ms", s.percentile(50))
	r.figure(name+"_p99_ms", s.percentile(99))
}

func (r report) progress(format string, args ...any) {
	fmt.Fprintf(r.out, "%s "+format+"\n", append([]any{time.Now().Format(time.TimeOnly)}, args...)...)
}
