# One site on Google Cloud: engines in a network of their own that dial the gateways, and the token they join with. One state for
# each site.

terraform {
  required_version = ">= 1.11"
  required_providers {
    google = { source = "hashicorp/google", version = ">= 6.50, < 8.0" }
  }
  backend "gcs" {} # bucket and prefix come from -backend-config
}

variable "project" {
  description = "Project that holds the site."
  type        = string
}

provider "google" {
  project        = var.project
  region         = var.site.region
  default_labels = { project = "mico", site = var.site.name }
}

locals {
  cloud     = "gcp"
  secret_id = google_secret_manager_secret.site.id
}

resource "google_secret_manager_secret" "site" {
  secret_id = "mico-site-${var.site.name}"
  replication {
    user_managed {
      replicas { location = var.site.region }
    }
  }
}

resource "google_secret_manager_secret_version" "site" {
  secret                 = google_secret_manager_secret.site.id
  secret_data_wo         = local.secret
  secret_data_wo_version = var.token_version
}

module "pool" {
  source    = "../../modules/pool-gcp"
  pool      = merge(var.site, { role = "engine" })
  user_data = module.machine.user_data
  secrets   = [google_secret_manager_secret.site.secret_id]
}
