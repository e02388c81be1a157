"""Studies of training with curvature (Botev 2020, chapter 4).

Source: Botev, "The Gauss-Newton matrix for deep learning models and its applications", 2020, chapter 4.
``autoencoders`` is figure 4.1, ``relu`` the longer run on the ReLU autoencoder of the K-BFGS paper's KFAC
comparison, ``alignment`` figures 4.2 and 4.3, ``mixture`` figure 4.4.
"""
