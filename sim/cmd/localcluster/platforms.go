package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/tessera-dra/tessera/sim/cluster/platform"
)

func platforms() *cobra.Command {
	return &cobra.Command{
		Use: "platforms [NAME]", Args: cobra.MaximumNArgs(1),
		Short: "List the platforms that a cluster can imitate, or describe one",
		Long: `List the platforms that "up --platform" imitates: what their nodes look like to
programs that run there, and what their API server admits. With a name: where the
facts are from, what is not imitated, and how Tessera is installed there.`,
		ValidArgsFunction: cobra.FixedCompletions(platform.Names(), cobra.ShellCompDirectiveNoFileComp),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return listPlatforms(cmd.OutOrStdout())
			}
			p, err := platform.Find(args[0])
			if err != nil {
				return err
			}
			describePlatform(cmd.OutOrStdout(), p)
			return nil
		},
	}
}

func listPlatforms(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, name := range platform.Names() {
		p, err := platform.Find(name)
		if err != nil {
			return err
		}
		fmt.Fprintf(w, "%s\t%s\n", name, p.Title)
	}
	return w.Flush()
}

func describePlatform(w io.Writer, p *platform.Platform) {
	fmt.Fprintf(w, "%s: %s\n", p.Name, p.Title)
	section(w, "Sources", p.Sources...)
	section(w, "Not imitated", p.NotImitated...)
	if p.Use.Cannot != "" {
		section(w, "Tessera can't work there", p.Use.Cannot)
		return
	}
	section(w, "Commands before helm install", p.Use.BeforeCommands()...)
	if p.Use.Values != "" {
		section(w, "Values of the chart", "deployments/helm/tessera/platforms/"+p.Use.Values)
	}
	section(w, "On the platform itself", lines(p.Use.Setup)...)
	var lacks []string
	for _, part := range slices.Sorted(maps.Keys(p.Use.Lacks)) {
		lacks = append(lacks, part+": "+p.Use.Lacks[part])
	}
	section(w, "What it can't have", lacks...)
}

func section(w io.Writer, title string, items ...string) {
	if len(items) == 0 {
		return
	}
	fmt.Fprintf(w, "\n%s:\n", title)
	for _, item := range items {
		fmt.Fprintf(w, "  %s\n", item)
	}
}

func lines(text string) []string {
	return strings.FieldsFunc(strings.TrimSpace(text), func(r rune) bool { return r == '\n' })
}
