// Package gcp is the Google Cloud backend.
package gcp
