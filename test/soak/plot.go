package main

import (
	"bytes"
	_ "embed"
	"fmt"
	"math"
	"strings"
	"text/template"
	"time"
)

// The size of a panel, in pixels.
const width, height = 760.0, 110.0

// panel is a diagram of some series over time.
type panel struct {
	Title, Max string
	Top        float64
	Lines      []line
}

// line is a series: the points of its polylines, one for each run of values.
type line struct {
	Name, Colour string
	Label        float64
	Runs         []string
}

// tick is a fault.
type tick struct {
	X    float64
	Name string
}

//go:embed testdata/plot.svg
var picture string

// plot draws the samples, a panel for each unit, with a tick for each fault.
func plot(samples []sample, faults []event) ([]byte, error) {
	end := time.Minute
	for _, s := range samples {
		end = max(end, s.at)
	}
	for _, f := range faults {
		end = max(end, f.at)
	}
	groups := []struct {
		title  string
		series []string
	}{
		{"memory, MiB", named("MiB")},
		{"goroutines", named("goroutines")},
		{"open files", named("open files")},
		{"journal and CDI files", counts[2:]},
		{"slices", counts[1:2]},
		{"pods that have ended", counts[:1]},
	}
	var data struct {
		Width, Height float64
		End           string
		Panels        []panel
		Faults        []tick
	}
	data.Width, data.Height, data.End = width, height, end.Round(time.Second).String()
	for i, g := range groups {
		p := panel{Title: g.title, Top: float64(i) * (height + 40)}
		top := 1.0
		for _, s := range samples {
			for _, name := range g.series {
				top = max(top, s.values[name])
			}
		}
		p.Max = fmt.Sprintf("%.0f", top)
		for j, name := range g.series {
			colour := []string{"#1f77b4", "#d62728", "#2ca02c"}[j]
			p.Lines = append(p.Lines, line{Name: name, Colour: colour, Label: float64(j) * 180, Runs: runs(samples, name, end, top)})
		}
		data.Panels = append(data.Panels, p)
	}
	for _, f := range faults {
		data.Faults = append(data.Faults, tick{X: round(width * f.at.Seconds() / end.Seconds()), Name: f.name})
	}
	t, err := template.New("plot").Parse(picture)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	err = t.Execute(&b, data)
	return b.Bytes(), err
}

// named lists the series of a unit.
func named(unit string) (all []string) {
	for _, p := range programs {
		all = append(all, p+" "+unit)
	}
	return all
}

// runs are the points of a series, in pixels. A sample without a value ends a run.
func runs(samples []sample, name string, end time.Duration, top float64) (all []string) {
	var points []string
	for _, s := range samples {
		v, ok := s.values[name]
		if ok {
			points = append(points, fmt.Sprintf("%g,%g", round(width*s.at.Seconds()/end.Seconds()), round(height*(1-v/top))))
			continue
		}
		all, points = append(all, strings.Join(points, " ")), nil
	}
	return append(all, strings.Join(points, " "))
}

func round(v float64) float64 { return math.Round(v*10) / 10 }
