package main

import (
	_ "embed"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"

	"sigs.k8s.io/yaml"
)

//go:embed limits.yaml
var limitsFile []byte

// limit is what a count is compared with; limits.yaml says what the fields mean.
type limit struct {
	Name    string  `json:"name"`
	Base    int     `json:"base"`
	Wanted  float64 `json:"wanted,omitempty"`
	Most    int     `json:"most,omitempty"`
	Ceiling int     `json:"ceiling,omitempty"`
}

func readLimits() (map[string]limit, error) {
	var all []limit
	if err := yaml.UnmarshalStrict(limitsFile, &all); err != nil {
		return nil, fmt.Errorf("read limits.yaml: %w", err)
	}
	limits := map[string]limit{}
	for _, l := range all {
		limits[l.Name] = l
	}
	return limits, nil
}

// wanted returns the largest count that is wanted; 0: any is as good.
func (l limit) wanted() int {
	if l.Most > 0 {
		return l.Most
	}
	return int(float64(l.Base)*l.Wanted + 1e-9)
}

// count is how many there are of what a limit is for.
type count struct {
	name   string
	n      int
	places []string // none for lines
}

// report prints the counts, each in a line beside its limits; then, if list is set, their places.
// It returns an error for those above their ceilings.
func report(counts []count, limits map[string]limit, list bool, out io.Writer) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "\tnow\tbase\tratio\twanted\tceiling")
	var errs []error
	for _, c := range counts {
		l, there := limits[c.name]
		if !there {
			return fmt.Errorf("%s: not in hack/joints/limits.yaml", c.name)
		}
		fmt.Fprintf(table, "%s\t%d\t%d\t%.2f\t%s\t%s\n", c.name, c.n, l.Base, float64(c.n)/float64(l.Base), orNone(l.wanted()), orNone(l.Ceiling))
		if l.Ceiling > 0 && c.n > l.Ceiling {
			errs = append(errs, fmt.Errorf("%s: %d, and the ceiling is %d: do without the new one (-list shows all), "+
				"or raise the ceiling in hack/joints/limits.yaml and say in the commit what it is for", c.name, c.n, l.Ceiling))
		}
	}
	errs = append(errs, table.Flush())
	if list {
		for _, c := range counts {
			fmt.Fprintf(out, "\n%s: %d\n", c.name, c.n)
			for _, place := range c.places {
				fmt.Fprintln(out, " ", place)
			}
		}
	}
	return errors.Join(errs...)
}

func orNone(n int) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}
